"""Lets objects of every room be shown in notebooks as what the command line prints of them."""

from importlib import import_module


class ShownInNotebooks:
    """In notebooks a page of `report.notebook`, which is above and so is reached by name."""

    def _repr_html_(self) -> str:
        return import_module("fullstride.report.notebook").html(self)
