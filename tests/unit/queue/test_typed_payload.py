from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import typing
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Literal, NewType
from uuid import UUID

import pytest

from jobsync_orm.exceptions import InvalidJob, InvalidPayload
from jobsync_orm.queue.typed_payload import checked_model, dump, load

pydantic = pytest.importorskip("pydantic")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Sku = NewType("Sku", str)


class Address(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    city: str


@dataclass(frozen=True)
class Line:
    sku: Sku
    amount: Decimal
    gifts: list[Line] = field(default_factory=list)


@dataclass
class Order:
    id: int
    customer: UUID
    at: datetime.datetime
    day: datetime.date
    colour: Colour
    lines: list[Line]
    address: Address
    weight: float = 0.0
    express: bool = False
    note: str | None = None
    either: int | float | str = 0
    pair: tuple[int, str] = (0, "")
    many: tuple[int, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    speed: Literal["slow", 2] = "slow"
    at_noon: datetime.time | None = None
    extra: Any = None
    bare: dict = field(default_factory=dict)  # type: ignore[type-arg]
    known: ClassVar[int] = 5
    computed: int = field(init=False, default=7)


ORDER = Order(
    id=1,
    customer=UUID(int=5),
    at=datetime.datetime(2031, 1, 2, 3, 4, 5, 6, datetime.UTC),
    day=datetime.date(2031, 1, 2),
    colour=Colour.BLUE,
    lines=[Line(Sku("a"), Decimal("1.50"), [Line(Sku("b"), Decimal("0"))])],
    address=Address(city="Riga"),
    weight=3,
    either=1.5,
    pair=(4, "x"),
    many=(1, 2, 3),
    sizes={"s": 1},
    speed=2,
    at_noon=datetime.time(12),
    extra=[1, {"a": None}],
    bare={"b": [True]},
)


def test_dataclass_comes_back_as_it_was() -> None:
    assert checked_model(Order) is Order
    stored = dump(Order, ORDER)
    assert stored["customer"] == str(ORDER.customer)
    assert stored["lines"] == [{"sku": "a", "amount": "1.50", "gifts": [{"sku": "b", "amount": "0", "gifts": []}]}]
    assert stored["address"] == {"city": "Riga"}
    assert type(stored["weight"]) is float
    assert "known" not in stored
    assert "computed" not in stored
    back = load(Order, json.loads(json.dumps(stored)))
    assert back == ORDER
    assert back.lines[0].gifts[0].amount == Decimal("0")


def test_dict_of_what_is_stored_or_of_values_may_be_enqueued() -> None:
    stored = dump(Order, ORDER)
    assert dump(Order, stored) == stored
    values = {"sku": "a", "amount": Decimal("1.50")}
    assert dump(Line, values) == {"sku": "a", "amount": "1.50", "gifts": []}


@dataclass
class Small:
    id: int
    name: str = ""
    flag: bool = False
    ratio: float = 0.0
    when: datetime.date | None = None
    colour: Colour | None = None
    nested: Line | None = None
    tags: list[str] = field(default_factory=list)
    pair: tuple[int, int] = (0, 0)
    map: dict[str, int] = field(default_factory=dict)
    one: Literal[1] = 1


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "Small: 'id' is missing"),
        ({"id": 1, "idd": 2, "x": 1}, "there is no field 'idd', there is no field 'x'"),
        ({"id": "1"}, r"Small\.id is '1' \(str\), not int"),
        ({"id": True}, r"Small\.id is True \(bool\), not int"),
        ({"id": 1.0}, r"Small\.id is 1.0 \(float\), not int"),
        ({"id": None}, r"Small\.id is None"),
        ({"id": 1, "name": 5}, r"Small\.name is 5 \(int\), not str"),
        ({"id": 1, "flag": 1}, r"Small\.flag is 1 \(int\), not bool"),
        ({"id": 1, "ratio": "1"}, r"Small\.ratio is '1' \(str\), not float"),
        ({"id": 1, "ratio": True}, r"Small\.ratio is True"),
        ({"id": 1, "when": "2031-13-01"}, r"Small\.when is '2031-13-01' \(str\), not date or NoneType"),
        ({"id": 1, "when": datetime.datetime(2031, 1, 1)}, r"Small\.when is"),
        ({"id": 1, "colour": "green"}, r"Small\.colour is 'green'"),
        ({"id": 1, "nested": {"sku": "a"}}, r"Small\.nested is \{'sku': 'a'\}"),
        ({"id": 1, "tags": "abc"}, r"Small\.tags is 'abc' \(str\), not a list"),
        ({"id": 1, "tags": ["a", 2]}, r"Small\.tags\[1\] is 2 \(int\), not str"),
        ({"id": 1, "pair": [1]}, r"Small\.pair is \[1\] \(list\), not a list of 2"),
        ({"id": 1, "map": {"a": "b"}}, r"Small\.map\['a'\] is 'b'"),
        ({"id": 1, "map": {1: 1}}, r"a key of Small\.map is 1"),
        ({"id": 1, "map": [1]}, r"Small\.map is \[1\] \(list\), not a dict"),
        ({"id": 1, "one": True}, r"Small\.one is True \(bool\), not one of 1"),
        ([1], r"Small is \[1\] \(list\), not a dict with the fields of Small"),
        (None, "Small is None"),
    ],
)
def test_dataclass_that_does_not_fit(payload: Any, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        load(Small, payload)
    with pytest.raises(InvalidPayload, match=message):
        dump(Small, payload)


def test_instance_with_wrong_values_is_not_stored() -> None:
    with pytest.raises(InvalidPayload, match=r"Small\.id is '1' \(str\), not int"):
        dump(Small, Small(id="1"))  # type: ignore[arg-type]
    with pytest.raises(InvalidPayload, match=r"Small\.when is"):
        dump(Small, Small(id=1, when=datetime.datetime(2031, 1, 1)))

    @dataclass
    class Larger(Small):
        more: int = 0

    with pytest.raises(InvalidPayload, match="not a Small"):
        dump(Small, Larger(1))


def test_validation_of_the_dataclasss_own() -> None:
    @dataclass
    class Positive:
        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("negative")

    assert load(Positive, {"value": 1}).value == 1
    with pytest.raises(InvalidPayload, match="the payload is no Positive: negative"):
        load(Positive, {"value": -1})


def made(hint: Any) -> Any:
    return dataclasses.make_dataclass("Made", [("x", hint)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (made(bytes), r"Made\.x is of type bytes"),
        (made(set[int]), r"Made\.x is of type"),
        (made(list[complex]), r"Made\.x is of type complex"),
        (made(made(bytes)), r"Made\.x is of type bytes"),
        (made(list[made(bytes)]), r"Made\.x is of type bytes"),  # type: ignore[misc]
        (made(dict[int, str]), "keys are no text"),
        (made(typing.TypeVar("T")), r"Made\.x is of type"),  # type: ignore[misc]
        (made(InitVar[int]), "InitVar"),
        (made("NoSuchName"), "cannot be found out"),
        (made(enum.Enum("Odd", {"A": (1, 2)})), "must have text or numbers"),
        (dict, "must be a dataclass or a pydantic model"),
        (Small(1), "the class, not an instance"),
        (Address(city="x"), "the class, not an instance"),
    ],
)
def test_model_that_cannot_be_one(model: Any, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        checked_model(model)


class Payment(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    order_id: int = pydantic.Field(alias="orderId", gt=0)
    amount: Decimal
    day: datetime.date
    colour: Colour = Colour.RED

    @pydantic.computed_field  # type: ignore[prop-decorator,misc]
    def doubled(self) -> Decimal:
        return self.amount * 2


def test_pydantic_model_comes_back_as_it_was() -> None:
    assert checked_model(Payment) is Payment
    payment = Payment(orderId=1, amount=Decimal("9.99"), day=datetime.date(2031, 1, 2))
    stored = dump(Payment, payment)
    assert stored == {"orderId": 1, "amount": "9.99", "day": "2031-01-02", "colour": "red"}
    assert load(Payment, json.loads(json.dumps(stored))) == payment
    values = {"orderId": 1, "amount": Decimal("9.99"), "day": datetime.date(2031, 1, 2)}
    assert dump(Payment, values) == stored


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"amount": "1", "day": "2031-01-02"}, "the payload is no Payment: orderId: Field required"),
        ({"orderId": 0, "amount": "1", "day": "x"}, "orderId: Input should be greater than 0; day: "),
        (None, "the payload is no Payment: the payload: "),
    ],
)
def test_pydantic_model_that_does_not_fit(payload: Any, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        load(Payment, payload)
    with pytest.raises(InvalidPayload):
        dump(Payment, payload)


def test_model_that_could_not_read_what_it_writes_is_noticed_when_it_is_enqueued() -> None:
    class Renamed(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        id: int = pydantic.Field(validation_alias="a", serialization_alias="b")

    with pytest.raises(InvalidPayload, match="the payload is no Renamed: a: Field required"):
        dump(Renamed, {"a": 1})
