"""What every process of the shop is told, by its environment."""

import os
from pathlib import Path

DATABASE = os.environ.get("SHOP_DATABASE", "postgresql+psycopg://postgres@127.0.0.1:5432/shop")
FOLDER = Path(os.environ.get("SHOP_FOLDER", ".shop"))
SMTP_PORT = int(os.environ.get("SHOP_SMTP_PORT", "2525"))
