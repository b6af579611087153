//! The forms AMD's tools print in, with their parsers.

use gpupool_devices::amd_tools::{
    amd_smi_json, amd_smi_text, amdgpu_top, firmware_info, rocm_smi_csv, rocm_smi_json, rocm_smi_text, rocminfo,
};
use gpupool_devices::{Snapshot, SourceError};

/// A form: its name, whether a text has it, and its parser.
pub type Form = (&'static str, fn(&str) -> bool, fn(&str) -> Result<Snapshot, SourceError>);

/// All of them.
pub const FORMS: [Form; 8] = [
    ("amd-smi JSON", amd_smi_json::looks_like, amd_smi_json::parse),
    ("amd-smi text", amd_smi_text::looks_like, amd_smi_text::parse),
    ("amdgpu_top", amdgpu_top::looks_like, amdgpu_top::parse),
    ("firmware", firmware_info::looks_like, firmware_info::parse),
    ("rocm-smi CSV", rocm_smi_csv::looks_like, rocm_smi_csv::parse),
    ("rocm-smi JSON", rocm_smi_json::looks_like, rocm_smi_json::parse),
    ("rocm-smi text", rocm_smi_text::looks_like, rocm_smi_text::parse),
    ("rocminfo", rocminfo::looks_like, rocminfo::parse),
];
