//! What the library answers instead of a value, sorted by what it is about: a field, a device, or the driver.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as nvml;

use crate::source::SourceError;
use crate::told::Told;

/// An answer of the library.
pub(super) type Answer<T> = Result<T, Code>;

/// A return code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Code(pub u32);

/// What a code speaks against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Against {
    /// This one field.
    Field,
    /// The device needs a reset, or a hand.
    Device,
    /// The device is not there any more.
    Presence,
    /// The driver as a whole: nothing is known of any device.
    Driver,
}

impl Code {
    pub const UNINITIALIZED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub const INVALID_ARGUMENT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub const NOT_SUPPORTED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub const NO_PERMISSION: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub const NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub const TOO_SMALL: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub const NO_POWER: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER);
    pub const DRIVER_NOT_LOADED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub const TIMEOUT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub const IRQ: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE);
    pub const FUNCTION_NOT_FOUND: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
    pub const LOST: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub const RESET_REQUIRED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED);
    pub const MISMATCH: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    pub const VERSION_OF_ARGUMENT: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub const DEPRECATED: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_DEPRECATED);
    pub const UNKNOWN: Self = Self(nvml::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// A return code as an answer.
    pub fn check(code: nvml::nvmlReturn_t) -> Answer<()> {
        if code == nvml::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Self(code)) }
    }

    /// What it speaks against when one field of a device was asked for.
    pub fn against(self) -> Against {
        match self {
            Self::RESET_REQUIRED => Against::Device,
            Self::LOST => Against::Presence,
            Self::UNINITIALIZED | Self::DRIVER_NOT_LOADED | Self::MISMATCH => Against::Driver,
            _ => Against::Field,
        }
    }

    /// What it speaks against when the handle of a device was asked for, where an error nobody can name is the device's.
    pub fn against_at_opening(self) -> Against {
        match self {
            Self::UNKNOWN | Self::IRQ | Self::NO_POWER => Against::Device,
            _ => self.against(),
        }
    }

    /// Whether another version of the function may do.
    pub fn wants_other_function(self) -> bool {
        matches!(self, Self::FUNCTION_NOT_FOUND | Self::VERSION_OF_ARGUMENT | Self::DEPRECATED)
    }

    /// What happened, in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::UNINITIALIZED => "NVML is not initialised",
            Self::INVALID_ARGUMENT => "NVML does not take this question for this device",
            Self::NOT_SUPPORTED => "not supported",
            Self::NO_PERMISSION => "no permission",
            Self::NOT_FOUND => "not found",
            Self::TOO_SMALL => "there is more than fits",
            Self::NO_POWER => "the power cables are not attached",
            Self::DRIVER_NOT_LOADED => "the NVIDIA driver is not loaded",
            Self::TIMEOUT => "timed out",
            Self::IRQ => "the kernel sees an interrupt problem with the device",
            Self::FUNCTION_NOT_FOUND => "this driver has no such function",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM) => "the device's stored settings are damaged",
            Self::LOST => "the GPU is lost",
            Self::RESET_REQUIRED => "the GPU requires a reset",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM) => "blocked by the operating system",
            Self::MISMATCH => "driver/library version mismatch",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_IN_USE) => "the GPU is in use",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_MEMORY) => "out of memory",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NO_DATA) => "no data",
            Self::VERSION_OF_ARGUMENT => "this driver has another version of the function",
            Self::DEPRECATED => "deprecated",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_NOT_READY) => "not ready",
            Self(nvml::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND) => "no GPU found",
            Self::UNKNOWN => "unknown error",
            _ => "an error gpupool does not know",
        }
    }

    /// A field that has no value.
    pub fn told<T>(self) -> Told<T> {
        match self {
            Self::NOT_SUPPORTED
            | Self::FUNCTION_NOT_FOUND
            | Self::INVALID_ARGUMENT
            | Self::VERSION_OF_ARGUMENT
            | Self::DEPRECATED => Told::Unsupported(self.words().into()),
            _ => Told::Failed(self.words().into()),
        }
    }

    /// The failure of the whole source; `doing` is what was tried.
    pub fn failure(self, doing: &str) -> SourceError {
        let text = format!("{doing}: {} (NVML code {})", self.words(), self.0);
        match self {
            Self::DRIVER_NOT_LOADED => SourceError::DriverNotLoaded(text),
            Self::MISMATCH => SourceError::VersionMismatch(text),
            Self::NO_PERMISSION => SourceError::NoPermission(text),
            _ => SourceError::Driver(text),
        }
    }
}

impl From<NvmlError> for Code {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::FailedToLoadSymbol(_) => Self::FUNCTION_NOT_FOUND,
            other => Self(other.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_about_a_field_a_device_or_the_driver() {
        assert_eq!(Code::NOT_SUPPORTED.against(), Against::Field);
        assert_eq!(Code::UNKNOWN.against(), Against::Field);
        assert_eq!(Code::UNKNOWN.against_at_opening(), Against::Device);
        assert_eq!(Code::LOST.against(), Against::Presence);
        assert_eq!(Code::MISMATCH.against(), Against::Driver);
        assert!(matches!(Code::NO_PERMISSION.told::<u8>(), Told::Failed(_)));
        assert!(matches!(Code::INVALID_ARGUMENT.told::<u8>(), Told::Unsupported(_)));
        assert!(matches!(Code::MISMATCH.failure("x"), SourceError::VersionMismatch(_)));
    }
}
