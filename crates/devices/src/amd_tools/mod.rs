//! What AMD's tools print, in each of their forms, and the tools as sources.
//!
//! Each form has a parser of its own that ends in one of two shapes: the tree amd-smi gives in JSON (`amd_smi_tree`) or
//! the keys rocm-smi gives for each card (`rocm_smi_cards`). What a field means is written down there, once.

mod amd_smi_box;
pub mod amd_smi_json;
mod amd_smi_links;
mod amd_smi_processes;
mod amd_smi_tables;
pub mod amd_smi_text;
mod amd_smi_tree;
pub mod amdgpu_top;
mod facts;
pub mod firmware_info;
mod json_text;
mod links;
mod quantity;
mod rocm_smi_cards;
pub mod rocm_smi_csv;
pub mod rocm_smi_json;
mod rocm_smi_processes;
mod rocm_smi_tables;
pub mod rocm_smi_text;
pub mod rocminfo;
mod settle;
pub mod sources;
mod table;
mod tool_words;

pub use sources::{AmdSmi, RocmSmi};
