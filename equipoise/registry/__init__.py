"""Classes by name: those of the package, installed plug-ins, and the user's own code."""

from equipoise.registry.own_code import (
    allow_only,
    find_path,
    function_name,
    installed,
    is_own_code,
    load_object,
    load_plugin,
    short_name,
    use_folders,
)
from equipoise.registry.registry import Registry, choose, name_of
from equipoise.registry.signatures import Argument, arguments_of, docstring_of, settings_class

__all__ = [
    "Argument",
    "Registry",
    "allow_only",
    "arguments_of",
    "choose",
    "docstring_of",
    "find_path",
    "function_name",
    "installed",
    "is_own_code",
    "load_object",
    "load_plugin",
    "name_of",
    "settings_class",
    "short_name",
    "use_folders",
]
