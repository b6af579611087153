//! This machine: the environment, the file and the user that a configuration is made of, and the files, the directory and
//! the port it names.
//!
//! The file is never looked for in the working directory: a foreign directory must not be able to open the agent.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statfs};

use crate::limits;
use crate::load::{ConfigConsumer, ConfigInputs, FlagValues, LoadedConfig};
use crate::problem::{ConfigProblem, ConfigProblems};

/// The variable that names the file.
pub const CONFIG_VARIABLE: &str = "GPUPOOL_CONFIG";
/// The file of the machine.
pub const SYSTEM_FILE: &str = "/etc/gpupool/gpupool.toml";

/// The state directory of the machine's own agent.
pub(crate) const SYSTEM_STATE: &str = "/var/lib/gpupool";

/// The facts about a machine and its user that defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostContext {
    pub root: bool,
    pub host_name: String,
    /// Where this user's programs keep their state.
    pub state_home: Option<PathBuf>,
}

/// The Unix socket of the agent that uses a state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("agent.sock")
}

impl ConfigInputs {
    /// What this machine gives: `flags`, the environment, and the file. `named` is the file of `--config`, which must
    /// exist as the one in `GPUPOOL_CONFIG` must; the user's and the machine's own file may be missing.
    pub fn from_system(
        flags: FlagValues,
        named: Option<&Path>,
        consumer: ConfigConsumer,
    ) -> Result<Self, ConfigProblems> {
        let env: BTreeMap<String, String> = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        let machine = HostContext::here(&env);
        let mut file = None;
        for place in places(named, &env, machine.root) {
            if let Some(text) = read(&place)? {
                file = Some((place.path, text));
                break;
            }
        }
        Ok(Self { flags, env, file, machine, consumer, lenient: false })
    }
}

impl HostContext {
    /// The state directory of an agent that is given none.
    pub fn state_dir(&self) -> PathBuf {
        match &self.state_home {
            Some(home) if !self.root => home.join("gpupool"),
            _ => PathBuf::from(SYSTEM_STATE),
        }
    }

    fn here(env: &BTreeMap<String, String>) -> Self {
        let told = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name: String =
            told.trim().chars().map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' }).collect();
        Self {
            root: rustix::process::geteuid().is_root(),
            host_name: if name.is_empty() { "localhost".to_owned() } else { name },
            state_home: home(env, "XDG_STATE_HOME", ".local/state"),
        }
    }
}

/// A file that may hold the configuration.
#[derive(Debug, PartialEq)]
struct Place {
    path: PathBuf,
    /// Whether somebody named it, so that it must exist.
    named: bool,
}

/// Where the file is looked for, best first. The administrator's agent never reads a file below a user's home.
fn places(named: Option<&Path>, env: &BTreeMap<String, String>, root: bool) -> Vec<Place> {
    let variable = env.get(CONFIG_VARIABLE).filter(|path| !path.trim().is_empty()).map(PathBuf::from);
    if let Some(path) = named.map(Path::to_path_buf).or(variable) {
        return vec![Place { path, named: true }];
    }
    let users = home(env, "XDG_CONFIG_HOME", ".config").filter(|_| !root).map(|home| home.join("gpupool/gpupool.toml"));
    users.into_iter().chain([SYSTEM_FILE.into()]).map(|path| Place { path, named: false }).collect()
}

/// The directory a variable names, else the usual one below the home directory; relative ones do not count.
fn home(env: &BTreeMap<String, String>, variable: &str, usual: &str) -> Option<PathBuf> {
    let named = env.get(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    named.or_else(|| env.get("HOME").map(PathBuf::from).filter(|home| home.is_absolute()).map(|home| home.join(usual)))
}

/// The text of the file; `None` where there is none and none is needed.
fn read(place: &Place) -> Result<Option<String>, ConfigProblems> {
    let unreadable = |said: String| ConfigProblems(vec![ConfigProblem::unreadable(&place.path, said)]);
    let file = match File::open(&place.path) {
        Ok(file) => file,
        Err(error) if !place.named && is_absent(error.kind()) => return Ok(None),
        Err(error) => return Err(unreadable(format!("the configuration file cannot be opened: {error}"))),
    };
    let mut bytes = Vec::new();
    let read = file.take(limits::FILE_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(format!("the configuration file cannot be read: {error}")))?;
    String::from_utf8(bytes).map(Some).map_err(|_| unreadable("the configuration file is not UTF-8 text".to_owned()))
}

/// A machine's file that is not for this user is as good as none.
fn is_absent(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied)
}

// The look at files, the state directory and the port.

/// Facts about the files, the directory and the port that a configuration names. The default knows nothing, and unknown
/// facts lead to no findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineFacts {
    pub port: PortFact,
    pub tls_cert: FileFact,
    pub tls_key: FileFact,
    pub ca_file: FileFact,
    /// The configuration file itself.
    pub config_file: FileFact,
    pub state_dir: DirectoryFact,
}

/// Whether a port can be listened on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PortFact {
    #[default]
    Unknown,
    Free,
    /// Another process listens there: `python3 (pid 12)`, where this user may see it.
    InUse {
        by: Option<String>,
    },
    /// It cannot, for another reason.
    Refused(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FileFact {
    #[default]
    Unknown,
    Unreadable {
        path: PathBuf,
        why: String,
    },
    /// It can be read.
    Readable {
        path: PathBuf,
        /// Whether users who are neither its owner nor in its group can read it.
        others_can_read: bool,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectoryFact {
    /// Why nothing can be written there.
    pub not_writable: Option<String>,
    /// The kind of network file system it is on.
    pub network: Option<&'static str>,
}

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

impl MachineFacts {
    /// What this machine says about `loaded`, which came from `inputs`. Nothing is changed; the port is free again at once.
    pub fn gather(loaded: &LoadedConfig, inputs: &ConfigInputs) -> Self {
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
        Ok(about) => FileFact::Readable { path, others_can_read: about.permissions().mode() & 0o004 != 0 },
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
    use crate::skipped::skipped;

    fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn paths(named: Option<&str>, variables: &[(&str, &str)], root: bool) -> Vec<String> {
        let places = places(named.map(Path::new), &env(variables), root);
        places.into_iter().map(|place| place.path.display().to_string()).collect()
    }

    #[test]
    fn the_flag_is_before_the_variable_and_both_before_the_usual_places() {
        let variables = [("GPUPOOL_CONFIG", "/b.toml"), ("HOME", "/home/ann")];
        assert_eq!(paths(Some("a.toml"), &variables, false), ["a.toml"]);
        assert_eq!(paths(None, &variables, false), ["/b.toml"]);
        assert_eq!(paths(None, &variables[1..], false), ["/home/ann/.config/gpupool/gpupool.toml", SYSTEM_FILE]);
        let moved = [("XDG_CONFIG_HOME", "/cfg"), ("HOME", "/home/ann"), ("GPUPOOL_CONFIG", " ")];
        assert_eq!(paths(None, &moved, false), ["/cfg/gpupool/gpupool.toml", SYSTEM_FILE]);
    }

    #[test]
    fn what_this_machine_gives_can_be_loaded() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "[limits]\nconnections = 7").unwrap();
        let inputs = ConfigInputs::from_system(FlagValues::default(), Some(file.path()), ConfigConsumer::All).unwrap();
        assert_eq!(inputs.env.get("PATH"), std::env::var("PATH").ok().as_ref());
        assert!(!inputs.machine.host_name.is_empty());
        // The environment of whoever runs this test is not judged here.
        let loaded = crate::load_config(&ConfigInputs { env: BTreeMap::new(), ..inputs }).unwrap();
        assert_eq!(loaded.config.limits.connections, 7);
        assert!(loaded.config.server.state_dir.ends_with("gpupool"));
    }

    #[test]
    fn the_administrator_reads_no_file_of_a_home_directory() {
        assert_eq!(paths(None, &[("HOME", "/home/ann"), ("XDG_CONFIG_HOME", "/x")], true), [SYSTEM_FILE]);
    }

    #[test]
    fn a_named_file_must_exist_and_be_text() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str, named| Place { path: directory.path().join(name), named };
        assert_eq!(read(&at("missing.toml", false)), Ok(None));
        assert!(read(&at("missing.toml", true)).unwrap_err().to_string().contains("missing.toml"));
        fs::write(directory.path().join("latin.toml"), b"title = \"\xe9\"").unwrap();
        assert!(read(&at("latin.toml", false)).unwrap_err().to_string().contains("UTF-8"));
        assert!(read(&Place { path: directory.path().into(), named: false }).is_err());
    }

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
            assert_eq!(look_at_file(&path), FileFact::Readable { path: path.clone(), others_can_read });
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
            return skipped("a_directory_that_may_not_be_written_is_told", "root may write everywhere");
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let fact = look_at_directory(&directory.path().join("state"));
        assert!(fact.not_writable.is_some_and(|why| why.contains("denied")));
    }
}
