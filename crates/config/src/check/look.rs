//! Looks at the files, the directory and the port a configuration names. Nothing is changed; the port is free at once.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Access, access, statfs};

use super::facts::{DirectoryFact, Facts, FileFact, PortFact};
use crate::limits;
use crate::load::{Inputs, Loaded};

/// File systems of other machines, by the number the kernel gives them.
const NETWORK_FILE_SYSTEMS: &[(u32, &str)] = &[
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x00c3_6400, "Ceph"),
    (0x0102_1997, "9P"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x6573_5546, "FUSE"),
];

impl Facts {
    /// What this machine says about `loaded`, which came from `inputs`.
    pub fn here(loaded: &Loaded, inputs: &Inputs) -> Self {
        let server = &loaded.config.server;
        let file = |path: Option<&Path>| path.map_or(FileFact::Unknown, look_at_file);
        Self {
            port: try_port(&server.host, server.port),
            tls_cert: file(server.tls_cert.as_deref()),
            tls_key: file(server.tls_key.as_deref()),
            ca_file: file(loaded.config.client.ca_file.as_deref()),
            config_file: file(inputs.file.as_ref().map(|(path, _)| path.as_path())),
            state_dir: look_at_directory(&server.state_dir),
        }
    }
}

fn look_at_file(path: &Path) -> FileFact {
    let looked = fs::metadata(path).and_then(|about| match about.is_dir() {
        true => Err(ErrorKind::IsADirectory.into()),
        // Opening a pipe would wait for its writer.
        false if about.is_file() => File::open(path).map(|_| about),
        false => Ok(about),
    });
    let path = path.to_path_buf();
    match looked {
        Ok(about) => FileFact::Here { path, others_can_read: about.permissions().mode() & 0o004 != 0 },
        Err(error) => FileFact::Unreadable { path, why: error.to_string() },
    }
}

/// Looks at the directory, or at the nearest one above it that exists and in which it would be made.
fn look_at_directory(path: &Path) -> DirectoryFact {
    let Some(there) = path.ancestors().find(|above| above.symlink_metadata().is_ok()) else {
        // A relative path below the working directory.
        return look_at_directory(Path::new("."));
    };
    if !there.is_dir() {
        return DirectoryFact { not_writable: Some(format!("{} is not a directory", there.display())), network: None };
    }
    let writable = access(there, Access::WRITE_OK | Access::EXEC_OK);
    let not_writable = writable.err().map(|error| format!("{}: {}", there.display(), std::io::Error::from(error)));
    let network = statfs(there).ok().and_then(|about| {
        let kind = about.f_type as u32;
        NETWORK_FILE_SYSTEMS.iter().find(|(number, _)| *number == kind).map(|(_, name)| *name)
    });
    DirectoryFact { not_writable, network }
}

fn try_port(host: &str, port: u16) -> PortFact {
    if port == 0 {
        return PortFact::Free;
    }
    match TcpListener::bind((host, port)) {
        Ok(_) => PortFact::Free,
        Err(error) if error.kind() == ErrorKind::AddrInUse => PortFact::InUse { by: listener_on(port) },
        Err(error) => PortFact::Refused(error.to_string()),
    }
}

/// Who listens on `port`, as far as this user may see.
fn listener_on(port: u16) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let inode = tables.iter().flat_map(|table| table.lines()).find_map(|line| listening_socket(line, port))?;
    let socket = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").ok()?.flatten().take(limits::PROCESSES);
    let numbered = processes.filter(|entry| entry.file_name().to_string_lossy().bytes().all(|c| c.is_ascii_digit()));
    let holder = numbered.map(|entry| entry.path()).find(|process| {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        files.take(limits::PROCESSES).any(|file| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == &*socket))
    })?;
    let name = fs::read_to_string(holder.join("comm")).unwrap_or_default();
    Some(format!("{} (pid {})", name.trim(), holder.file_name()?.to_string_lossy()))
}

/// The inode of the socket in a line of `/proc/net/tcp`, where it listens on `port`.
fn listening_socket(line: &str, port: u16) -> Option<&str> {
    const LISTENS: &str = "0A";
    let mut words = line.split_whitespace().skip(1);
    let (_, local_port) = words.next()?.rsplit_once(':')?;
    let state = words.nth(1)?;
    (state == LISTENS && u16::from_str_radix(local_port, 16) == Ok(port)).then(|| words.nth(5))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_somebody_listens_on_is_in_use_and_the_listener_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let PortFact::InUse { by: Some(by) } = try_port("127.0.0.1", port) else {
            panic!("port {port} is taken: {:?}", try_port("127.0.0.1", port));
        };
        assert!(by.contains(&format!("(pid {})", std::process::id())), "{by}");
        assert_eq!(try_port("127.0.0.1", 0), PortFact::Free);
        assert!(matches!(try_port("203.0.113.1", 1), PortFact::Refused(_)));
    }

    #[test]
    fn files_are_looked_at_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key.pem");
        fs::write(&path, "key").unwrap();
        for (mode, others_can_read) in [(0o600, false), (0o644, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(look_at_file(&path), FileFact::Here { path: path.clone(), others_can_read });
        }
        for absent in [directory.path().join("none.pem"), directory.path().to_path_buf()] {
            assert!(matches!(look_at_file(&absent), FileFact::Unreadable { .. }), "{}", absent.display());
        }
    }

    #[test]
    fn a_directory_that_does_not_exist_yet_is_judged_by_the_one_above() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(look_at_directory(&directory.path().join("a/b")).not_writable, None);
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(look_at_directory(&file.join("below")).not_writable.is_some_and(|why| why.contains("not a directory")));
    }

    #[test]
    fn a_directory_that_may_not_be_written_is_told() {
        if rustix::process::geteuid().is_root() {
            let skipped: &[u8] = b"skipped a_directory_that_may_not_be_written_is_told: root may write everywhere\n";
            std::io::Write::write_all(&mut std::io::stderr(), skipped).unwrap();
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let fact = look_at_directory(&directory.path().join("state"));
        assert!(fact.not_writable.is_some_and(|why| why.contains("denied")));
    }
}
