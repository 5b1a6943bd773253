"""
What can go wrong in the engine, by who must act.

EngineError
├── RequestError            the caller of one request: `code` goes on the wire
│   ├── EmptyPrompt
│   ├── PromptTooLong
│   ├── InvalidParams
│   ├── InvalidText
│   ├── InvalidGrammar
│   ├── GrammarsUnavailable
│   ├── NoChatTemplate
│   └── ChatTemplateFailed
├── DeviceError             the process: it has to end, and another to begin
│   ├── DeviceFull
│   └── DeviceLost
└── StartupError            the operator: the message names the setting to change
    ├── ModelNotFound
    ├── UnknownArchitecture
    ├── WeightsMismatch
    ├── NotEnoughMemory
    ├── NoGPU
    ├── DriverTooOld
    └── GPUTooOld
"""


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class RequestError(EngineError):
    """Raised when one request cannot be served; others are not touched."""

    code = "invalid_job"


class EmptyPrompt(RequestError):
    """Raised when a prompt has no token and the model has no BOS to start from."""

    code = "empty_prompt"


class PromptTooLong(RequestError):
    """Raised when a prompt leaves no room for one answer token."""

    code = "prompt_too_long"


class InvalidParams(RequestError):
    """Raised when a sampling parameter is out of its range."""

    code = "invalid_job"


class InvalidText(RequestError):
    """Raised when a prompt is not Unicode text."""


class InvalidGrammar(RequestError):
    """Raised when a schema, regex or choice is none that answers can follow."""

    code = "invalid_grammar"


class GrammarsUnavailable(RequestError):
    """Raised when this engine can follow no grammar at all: for want of the library, or by its tokenizer."""

    code = "not_supported"


class NoChatTemplate(RequestError):
    """Raised when messages come for a model that has no chat template."""


class ChatTemplateFailed(RequestError):
    """Raised when the model's chat template does not take the messages."""


class DeviceError(EngineError):
    """Raised when the engine cannot go on in this process."""


class DeviceFull(DeviceError):
    """Raised when the device is out of memory again and again, however little runs."""


class DeviceLost(DeviceError):
    """Raised for an error of the device after which nothing works there any more, for this process."""


class StartupError(EngineError):
    """Raised when the engine cannot start; says what to change."""


class ModelNotFound(StartupError):
    """Raised when the model folder or file is not there or not complete."""


class UnknownArchitecture(StartupError):
    """Raised when config.json names an architecture that the engine does not have."""


class WeightsMismatch(StartupError):
    """Raised when the checkpoint's tensors are not those of the architecture."""


class NotEnoughMemory(StartupError):
    """Raised when the weights, or the KV cache of one sequence of max_model_len, have no room."""


class NoGPU(StartupError):
    """Raised when a GPU is wanted and torch finds none that it can use."""


class DriverTooOld(StartupError):
    """Raised when the NVIDIA driver is older than the CUDA that torch was built for."""


class GPUTooOld(StartupError):
    """Raised when the GPU lacks what the kernels are made of."""
