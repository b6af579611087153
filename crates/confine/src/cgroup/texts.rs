//! Reading `/proc/PID/mountinfo` and `/proc/PID/cgroup`. Pure functions over the texts; lines that make no sense are
//! skipped, as both files hold much that is not about control groups.

use std::path::{Path, PathBuf};

/// The two generations of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// A mounted control group hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its generation.
    pub version: Version,
    /// The controllers bound to it (v1 only; v2 tells them in a file).
    pub controllers: Vec<String>,
    /// Which part of the hierarchy is seen at the mount point: `/`, or deeper inside containers.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Whether it is mounted read-only.
    pub read_only: bool,
}

/// In which group of which hierarchy a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The v1 controllers of the hierarchy; empty for v2.
    pub controllers: Vec<String>,
    /// The group's path inside the hierarchy.
    pub path: PathBuf,
}

/// The control group hierarchies in a `mountinfo` text, in its order.
pub fn mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo.lines().filter_map(mount).collect()
}

/// The memberships in a `cgroup` text.
pub fn memberships(cgroup: &str) -> Vec<Membership> {
    cgroup.lines().filter_map(membership).collect()
}

fn mount(line: &str) -> Option<Mount> {
    // "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [tags…] - TYPE SOURCE SUPEROPTIONS"
    let (own, filesystem) = line.split_once(" - ")?;
    let own: Vec<&str> = own.split(' ').collect();
    let mut filesystem = filesystem.split(' ');
    let version = match filesystem.next()? {
        "cgroup" => Version::V1,
        "cgroup2" => Version::V2,
        _ => return None,
    };
    let super_options: Vec<&str> = filesystem.nth(1)?.split(',').collect();
    let read_only = own.get(5)?.split(',').any(|option| option == "ro") || super_options.contains(&"ro");
    let controllers = match version {
        Version::V2 => Vec::new(),
        Version::V1 => {
            super_options.iter().filter(|&&option| option != "rw" && option != "ro").map(|s| s.to_string()).collect()
        }
    };
    Some(Mount { version, controllers, root: unescaped(own.get(3)?), point: unescaped(own.get(4)?), read_only })
}

fn membership(line: &str) -> Option<Membership> {
    let mut parts = line.splitn(3, ':');
    parts.next()?.parse::<u32>().ok()?;
    let controllers = parts.next()?.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let path = Path::new(parts.next()?);
    path.is_absolute().then(|| Membership { controllers, path: path.to_owned() })
}

/// `mountinfo` writes blanks, tabs, line ends and backslashes as three octal digits.
fn unescaped(field: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if bytes[at] == b'\\' => {
                plain.push(byte);
                at += 4;
            }
            _ => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v2_mounts_are_read_with_tags_escapes_and_roots() {
        let text = "22 1 0:20 / /proc rw shared:12 - proc proc rw\n\
            30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n\
            31 23 0:26 /docker/abc /mnt/with\\040blank ro,nosuid - cgroup2 cgroup rw\n";
        let found = mounts(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].point, Path::new("/sys/fs/cgroup"));
        assert!(!found[0].read_only && found[0].controllers.is_empty() && found[0].version == Version::V2);
        assert_eq!(found[1].point, Path::new("/mnt/with blank"));
        assert_eq!(found[1].root, Path::new("/docker/abc"));
        assert!(found[1].read_only);
    }

    #[test]
    fn v1_mounts_tell_their_controllers() {
        let found = mounts("33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n");
        assert_eq!(found[0].controllers, ["cpu", "cpuacct"]);
        assert_eq!(found[0].version, Version::V1);
    }

    #[test]
    fn memberships_keep_colons_in_paths() {
        let found = memberships(
            "4:memory:/a:b/c\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/user.slice\nnonsense\n7:x:relative\n",
        );
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], Membership { controllers: vec!["memory".into()], path: "/a:b/c".into() });
        assert_eq!(found[3], Membership { controllers: vec![], path: "/user.slice".into() });
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[ -~\\n\\\\é]{0,300}") {
            let _ = (mounts(&text), memberships(&text), mounts(&format!("1 2 0:1 {text} - cgroup2 c {text}")));
        }
    }
}
