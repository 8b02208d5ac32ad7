"""What the stand-in gives for any name that is asked of it."""


def missing_class(name: str) -> type:
    """A class that can be named and subclassed; making an instance raises."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self, *args, **kwargs):
        raise RuntimeError(f"torchvision is not installed on this machine: {name}")

    return type(name, (), {"__init__": refuse})
