"""The exceptions of the package: one tree under `PyHotExpertsError`.

Each message says what was wrong, with which value, and what to do next.
"""

from __future__ import annotations


class PyHotExpertsError(Exception):
    """Base class of every exception that this package raises on purpose."""


class ConfigError(PyHotExpertsError, ValueError):
    """A parameter, command line flag or environment variable has a value that cannot be used."""


class GrammarError(ConfigError):
    """A grammar or a JSON schema cannot be used."""


class NativeLibraryError(PyHotExpertsError):
    """The compiled part of the package cannot be used in this process."""


class UnavailableError(PyHotExpertsError):
    """Something was asked for that this machine, build or model does not have."""


class ModelLoadError(PyHotExpertsError):
    """A file is not a model that can be loaded."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """There is no such model file."""


class OutOfMemoryError(PyHotExpertsError, MemoryError):
    """The model, its context or a buffer does not fit into VRAM or RAM."""


class PromptError(PyHotExpertsError, ValueError):
    """A prompt cannot be turned into tokens, or tokens are not of this model."""


class ContextFullError(PromptError):
    """There are more tokens than the context holds."""


class TemplateError(PyHotExpertsError, ValueError):
    """A chat template is wrong, or takes too much time or memory."""


class DecodeError(PyHotExpertsError):
    """The model could not be evaluated."""


class LoadCancelledError(PyHotExpertsError):
    """Loading was stopped before it was done."""


class BusyError(PyHotExpertsError):
    """The model is in use by another caller."""


class ClosedError(PyHotExpertsError):
    """The model was closed."""


class InternalError(PyHotExpertsError):
    """An assertion of the native code failed: a defect of this package or a damaged file."""
