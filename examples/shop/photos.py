"""The pictures of the products, and the small ones that each order gets."""

from pathlib import Path

from PIL import Image, ImageDraw

PRODUCTS = 20
SIZES = {"list": (160, 120), "detail": (320, 240)}


def photo(folder: Path, product: int) -> Path:
    return folder / "photos" / f"{product}.jpg"


def small(folder: Path, order_id: int, size: str) -> Path:
    # A folder for each hundred: file systems do not like ten thousand entries in one.
    return folder / "small" / str(order_id // 100) / f"{order_id}-{size}.jpg"


def take_photos(folder: Path) -> None:
    """Make a photo of each product."""
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for product in range(PRODUCTS):
        picture = Image.radial_gradient("L").resize((1024, 768)).convert("RGB")
        draw = ImageDraw.Draw(picture)
        for n in range(40):
            x, y = (product * 97 + n * 61) % 1000, (product * 53 + n * 89) % 740
            draw.ellipse((x, y, x + 120, y + 90), fill=((n * 37) % 256, (product * 29) % 256, (n * 11) % 256))
        picture.save(photo(folder, product), quality=90)


def resize(folder: Path, product: int, order_id: int) -> dict[str, list[int]]:
    """Make the small pictures of an order. Doing it twice gives the same files."""
    made = {}
    with Image.open(photo(folder, product)) as picture:
        picture.draft("RGB", (640, 480))  # JPEG can be decoded at a half of its size
        for name, size in SIZES.items():
            thumbnail = picture.copy()
            thumbnail.thumbnail(size)
            target = small(folder, order_id, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Under another name until it is whole: the process may be killed here.
            unfinished = target.with_suffix(".tmp")
            thumbnail.save(unfinished, "JPEG", quality=80)
            unfinished.replace(target)
            made[name] = list(thumbnail.size)
    return made
