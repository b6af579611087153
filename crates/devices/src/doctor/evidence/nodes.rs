//! The device nodes of GPUs, and whether they may be opened, told without opening one: opening can wake a GPU.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use gpupool_core::device::Vendor;
use rustix::fs::{Access as Wanted, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::doctor::evidence::names_in;
use crate::told::{Told, Words};
use crate::{kernel_file, limits, pci_bus};

/// Whether the current user may open a node to read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Yes.
    Granted,
    /// The mode of the node says no.
    Denied,
    /// The mode may say yes, the kernel says no: the rules of the device control group.
    Forbidden,
    /// It cannot be told, in the kernel's words.
    Unknown(Words),
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name below `/dev`: `nvidia0`, `kfd`, `dri/renderD128`.
    pub name: String,
    /// Whose devices it leads to, where that is known.
    pub vendor: Option<Vendor>,
    /// Its permission bits.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether the current user may use it.
    pub access: Access,
}

impl Node {
    /// Whether its mode lets members of its group read and write.
    pub(crate) fn is_open_to_group(&self) -> bool {
        self.mode & 0o060 == 0o060
    }

    /// The number of an `nvidia<number>` node.
    pub(crate) fn nvidia_minor(&self) -> Option<u32> {
        self.name.strip_prefix("nvidia")?.parse().ok()
    }

    /// Whether it is a render node.
    pub(crate) fn is_render(&self) -> bool {
        self.name.starts_with("dri/renderD")
    }
}

/// The nodes that lead to GPUs.
pub(super) fn nodes(dev: &Path, sys: &Path) -> Told<Vec<Node>> {
    let names = match names_in(dev) {
        Ok(names) => names,
        Err(error) => return kernel_file::missing(&error),
    };
    let render = names_in(&dev.join("dri")).unwrap_or_default();
    let render = render.iter().filter(|name| name.starts_with("renderD")).map(|name| {
        let vendor = kernel_file::number::<u16>(&sys.join("class/drm").join(name).join("device/vendor"));
        (format!("dri/{name}"), vendor.value().map(|&id| pci_bus::maker(id).unwrap_or(Vendor::Other)))
    });
    let direct = names.into_iter().filter_map(|name| match name.as_str() {
        "kfd" => Some((name, Some(Vendor::Amd))),
        _ if is_nvidia(&name) => Some((name, Some(Vendor::Nvidia))),
        _ => None,
    });
    let seen = direct.chain(render).filter_map(|(name, vendor)| node(dev, name, vendor));
    Told::Value(seen.take(limits::DEVICES).collect())
}

fn is_nvidia(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("nvidia") else { return false };
    matches!(rest, "ctl" | "-uvm" | "-uvm-tools") || !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())
}

fn node(dev: &Path, name: String, vendor: Option<Vendor>) -> Option<Node> {
    let path = dev.join(&name);
    let facts = std::fs::metadata(&path).ok()?;
    let mode = facts.permissions().mode() & 0o7777;
    Some(Node { name, vendor, mode, uid: facts.uid(), gid: facts.gid(), access: access(&path) })
}

fn access(path: &Path) -> Access {
    match accessat(CWD, path, Wanted::READ_OK | Wanted::WRITE_OK, AtFlags::EACCESS) {
        Ok(()) => Access::Granted,
        Err(Errno::ACCESS) => Access::Denied,
        Err(Errno::PERM) => Access::Forbidden,
        Err(error) => Access::Unknown(error.to_string().into()),
    }
}
