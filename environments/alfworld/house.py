"""What the rooms of ALFWorld hold: types of receptacles and objects, and where objects are kept.

Counted in the 3,553 training games of the release; rare places are left out. Generated games are
drawn from these tables, with fewer cabinets and drawers, and the scripted expert searches likely
places first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")  # receptacles that may be closed


class Treatment(NamedTuple):
    """What must be done to an object before it is placed."""

    verb: str  # objects that allow it have the property verb + "able"
    done: str  # predicate that holds afterwards
    where: str  # receptacle type
    undo: str  # verb of the treatment that takes it away, "" if none does


TREATMENTS = {  # of the task types that have one
    "pick_clean_then_place_in_recep": Treatment("clean", "isClean", "SinkBasin", ""),
    "pick_heat_then_place_in_recep": Treatment("heat", "isHot", "Microwave", "cool"),
    "pick_cool_then_place_in_recep": Treatment("cool", "isCool", "Fridge", "heat"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of objects."""

    places: Mapping[str, int]  # {receptacle type that can hold it: share of its objects there, %}
    properties: tuple[str, ...]  # predicates of the domain, "pickupable" first where it can be


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of room; every scene of it draws its own receptacles."""

    scenes: range
    receptacles: Mapping[str, tuple[int, int]]  # {type: fewest and most of a scene}
    objects: tuple[str, ...]  # what its games draw from
    fixtures: tuple[str, ...]  # stand beside receptacles and cannot be used


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _objects() -> dict[str, Kind]:
    """``name | properties | receptacle share, ...`` in each line of data/objects.txt."""
    table = (resources.files(__package__) / "data" / "objects.txt").read_text(encoding="utf-8")
    kinds = {}
    for line in table.splitlines():
        name, properties, places = (part.strip() for part in line.split("|"))
        shares = dict(place.split() for place in places.split(", "))
        kinds[name] = Kind({k: int(v) for k, v in shares.items()}, tuple(properties.split()))
    return kinds


OBJECTS = _objects()  # those that games place in receptacles

ROOMS: dict[str, Room] = {
    "kitchen": Room(
        range(1, 31),
        {
            "CounterTop": (1, 3),
            "Cabinet": (2, 5),
            "Drawer": (1, 3),
            "StoveBurner": (1, 2),
            "Fridge": (1, 1),
            "Microwave": (1, 1),
            "SinkBasin": (1, 1),
            "CoffeeMachine": (1, 1),
            "Toaster": (1, 1),
            "GarbageCan": (1, 1),
            "DiningTable": (0, 1),
            "Shelf": (0, 1),
            "SideTable": (0, 1),
        },
        _words(
            "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle "
            "Lettuce Mug Pan PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon "
            "Tomato WineBottle"
        ),
        ("StoveKnob", "Window", "LightSwitch", "Chair"),
    ),
    "living room": Room(
        range(201, 231),
        {
            "Sofa": (1, 1),
            "ArmChair": (1, 2),
            "CoffeeTable": (1, 1),
            "SideTable": (1, 2),
            "Drawer": (3, 5),
            "Shelf": (1, 3),
            "GarbageCan": (1, 1),
            "Cabinet": (0, 2),
            "DiningTable": (0, 1),
            "Dresser": (0, 1),
            "TVStand": (0, 1),
        },
        _words(
            "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Pillow Plate "
            "RemoteControl Statue TissueBox Vase Watch WateringCan"
        ),
        ("Television", "Painting", "HousePlant", "FloorLamp", "Window", "LightSwitch"),
    ),
    "bedroom": Room(
        range(301, 331),
        {
            "Bed": (1, 1),
            "Desk": (1, 1),
            "SideTable": (1, 2),
            "Drawer": (4, 6),
            "Shelf": (2, 4),
            "GarbageCan": (1, 1),
            "Dresser": (0, 1),
            "ArmChair": (0, 1),
            "LaundryHamper": (0, 1),
            "Safe": (0, 1),
        },
        _words(
            "AlarmClock Book Bowl Box CD CellPhone CreditCard DeskLamp KeyChain Laptop Mug Pen "
            "Pencil Pillow Statue TissueBox Vase Watch"
        ),
        ("Mirror", "Blinds", "Chair", "Window", "LightSwitch"),
    ),
    "bathroom": Room(
        range(401, 431),
        {
            "CounterTop": (1, 1),
            "SinkBasin": (1, 2),
            "Toilet": (1, 1),
            "ToiletPaperHanger": (1, 1),
            "HandTowelHolder": (1, 2),
            "TowelHolder": (1, 1),
            "GarbageCan": (1, 1),
            "Cabinet": (2, 4),
            "Drawer": (1, 3),
            "BathtubBasin": (0, 1),
            "Shelf": (0, 2),
            "Cart": (0, 1),
        },
        _words(
            "Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox "
            "ToiletPaper Towel"
        ),
        ("Mirror", "ShowerDoor", "Plunger", "ScrubBrush", "LightSwitch"),
    ),
}
