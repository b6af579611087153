//! Inputs and facts of this machine: environment, configuration file and user, and the files, directory and port that a
//! configuration names.
//!
//! The configuration file is never read from the working directory, so a foreign directory cannot open the agent to
//! others.

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

/// Variable with the path of the configuration file.
pub const CONFIG_VARIABLE: &str = "GPUPOOL_CONFIG";
/// Configuration file of the machine.
pub const SYSTEM_FILE: &str = "/etc/gpupool/gpupool.toml";

/// State directory of the machine's agent.
pub(crate) const SYSTEM_STATE_DIR: &str = "/var/lib/gpupool";

/// Properties of the machine and user that defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostContext {
    pub root: bool,
    pub host_name: String,
    /// Directory for the state of this user's programs.
    pub state_home: Option<PathBuf>,
}

/// Returns the Unix socket of the agent that uses a state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("agent.sock")
}

impl ConfigInputs {
    /// Collects the inputs of this machine: `flags`, the environment and the file. The file of `--config` (`file`) or
    /// `GPUPOOL_CONFIG` must exist; the user's and the machine's default files are optional.
    pub fn from_system(
        flags: FlagValues,
        is_required: Option<&Path>,
        consumer: ConfigConsumer,
    ) -> Result<Self, ConfigProblems> {
        let env: BTreeMap<String, String> = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        let machine = HostContext::detect(&env);
        let mut file = None;
        for place in config_file_candidates(is_required, &env, machine.root) {
            if let Some(text) = read_config_file(&place)? {
                file = Some((place.path, text));
                break;
            }
        }
        Ok(Self { flags, env, file, machine, consumer, lenient: false })
    }
}

impl HostContext {
    /// Returns the default state directory.
    pub fn state_dir(&self) -> PathBuf {
        match &self.state_home {
            Some(home) if !self.root => home.join("gpupool"),
            _ => PathBuf::from(SYSTEM_STATE_DIR),
        }
    }

    /// Returns the context of root on any host, for defaults in help and documentation.
    pub(crate) fn for_documentation() -> Self {
        Self { root: true, host_name: "the host name".to_owned(), state_home: None }
    }

    fn detect(env: &BTreeMap<String, String>) -> Self {
        let host_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name: String = host_name
            .trim()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' })
            .collect();
        Self {
            root: rustix::process::geteuid().is_root(),
            host_name: if name.is_empty() { "localhost".to_owned() } else { name },
            state_home: user_directory(env, "XDG_STATE_HOME", ".local/state"),
        }
    }
}

/// File that may contain the configuration.
#[derive(Debug, PartialEq)]
struct ConfigFileCandidate {
    path: PathBuf,
    /// Whether the file was named and must exist.
    is_required: bool,
}

/// Returns the candidate files, best first. The agent of root never reads a file below a home directory.
fn config_file_candidates(
    is_required: Option<&Path>,
    env: &BTreeMap<String, String>,
    root: bool,
) -> Vec<ConfigFileCandidate> {
    let variable = env.get(CONFIG_VARIABLE).filter(|path| !path.trim().is_empty()).map(PathBuf::from);
    if let Some(path) = is_required.map(Path::to_path_buf).or(variable) {
        return vec![ConfigFileCandidate { path, is_required: true }];
    }
    let users = user_directory(env, "XDG_CONFIG_HOME", ".config")
        .filter(|_| !root)
        .map(|home| home.join("gpupool/gpupool.toml"));
    users.into_iter().chain([SYSTEM_FILE.into()]).map(|path| ConfigFileCandidate { path, is_required: false }).collect()
}

/// Returns the directory in a variable, or the default below the home directory. Relative paths are ignored.
fn user_directory(env: &BTreeMap<String, String>, variable: &str, usual: &str) -> Option<PathBuf> {
    let is_required = env.get(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    is_required
        .or_else(|| env.get("HOME").map(PathBuf::from).filter(|home| home.is_absolute()).map(|home| home.join(usual)))
}

/// Reads the file; `None` if it is missing and optional.
fn read_config_file(place: &ConfigFileCandidate) -> Result<Option<String>, ConfigProblems> {
    let unreadable = |message: String| ConfigProblems(vec![ConfigProblem::unreadable(&place.path, message)]);
    let file = match File::open(&place.path) {
        Ok(file) => file,
        Err(error) if !place.is_required && is_treated_as_missing(error.kind()) => return Ok(None),
        Err(error) => return Err(unreadable(format!("cannot open the configuration file: {error}"))),
    };
    let mut bytes = Vec::new();
    let read = file.take(limits::FILE_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(format!("cannot read the configuration file: {error}")))?;
    String::from_utf8(bytes).map(Some).map_err(|_| unreadable("the configuration file is not UTF-8 text".to_owned()))
}

/// Whether an optional file counts as missing: also one that this user cannot read.
fn is_treated_as_missing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied)
}

// Inspection of files, the state directory and the port.

/// Facts about the files, the directory and the port that a configuration names. Unknown facts (the default) lead to no
/// findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineFacts {
    pub port: PortFact,
    pub tls_cert: FileFact,
    pub tls_key: FileFact,
    pub ca_file: FileFact,
    /// Configuration file.
    pub config_file: FileFact,
    pub state_dir: DirectoryFact,
}

/// Availability of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PortFact {
    #[default]
    Unknown,
    Free,
    /// Another process listens on it, such as `python3 (pid 12)` if this user can see it.
    InUse {
        by: Option<String>,
    },
    /// Listening fails for another reason.
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
    /// The file can be read.
    Readable {
        path: PathBuf,
        /// Whether users other than its owner and group can read it.
        others_can_read: bool,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectoryFact {
    /// Reason why the directory is not writable.
    pub not_writable: Option<String>,
    /// Type of the network file system.
    pub network: Option<&'static str>,
}

/// Network file systems by the kernel's magic number.
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
    /// Gathers the facts for `loaded`, which was loaded from `inputs`. Changes nothing; the probed port is free again at
    /// once.
    pub fn gather(loaded: &LoadedConfig, inputs: &ConfigInputs) -> Self {
        let server = &loaded.config.server;
        let file = |path: Option<&Path>| path.map_or(FileFact::Unknown, inspect_file);
        Self {
            port: probe_port(&server.host, server.port),
            tls_cert: file(server.tls_cert.as_deref()),
            tls_key: file(server.tls_key.as_deref()),
            ca_file: file(loaded.config.client.ca_file.as_deref()),
            config_file: file(inputs.file.as_ref().map(|(path, _)| path.as_path())),
            state_dir: inspect_directory(&server.state_dir),
        }
    }
}

fn inspect_file(path: &Path) -> FileFact {
    let metadata = fs::metadata(path).and_then(|about| match about.is_dir() {
        true => Err(ErrorKind::IsADirectory.into()),
        // Opening a pipe would block until it has a writer.
        false if about.is_file() => File::open(path).map(|_| about),
        false => Ok(about),
    });
    let path = path.to_path_buf();
    match metadata {
        Ok(about) => FileFact::Readable { path, others_can_read: about.permissions().mode() & 0o004 != 0 },
        Err(error) => FileFact::Unreadable { path, why: error.to_string() },
    }
}

/// Inspects the directory, or its nearest existing ancestor.
fn inspect_directory(path: &Path) -> DirectoryFact {
    let Some(there) = path.ancestors().find(|above| above.symlink_metadata().is_ok()) else {
        // A relative path in the working directory.
        return inspect_directory(Path::new("."));
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

fn probe_port(host: &str, port: u16) -> PortFact {
    if port == 0 {
        return PortFact::Free;
    }
    match TcpListener::bind((host, port)) {
        Ok(_) => PortFact::Free,
        Err(error) if error.kind() == ErrorKind::AddrInUse => PortFact::InUse { by: describe_listener(port) },
        Err(error) => PortFact::Refused(error.to_string()),
    }
}

/// Describes the process that listens on `port`, if this user can see it.
fn describe_listener(port: u16) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let inode = tables.iter().flat_map(|table| table.lines()).find_map(|line| listening_inode(line, port))?;
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

/// Returns the inode of a listening socket from a line of `/proc/net/tcp`.
fn listening_inode(line: &str, port: u16) -> Option<&str> {
    const LISTEN_STATE: &str = "0A";
    let mut words = line.split_whitespace().skip(1);
    let (_, local_port) = words.next()?.rsplit_once(':')?;
    let state = words.nth(1)?;
    (state == LISTEN_STATE && u16::from_str_radix(local_port, 16) == Ok(port)).then(|| words.nth(5))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skipped::skipped;

    fn env(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn paths(is_required: Option<&str>, variables: &[(&str, &str)], root: bool) -> Vec<String> {
        let places = config_file_candidates(is_required.map(Path::new), &env(variables), root);
        places.into_iter().map(|place| place.path.display().to_string()).collect()
    }

    #[test]
    fn the_flag_precedes_the_variable_and_both_precede_the_default_files() {
        let variables = [("GPUPOOL_CONFIG", "/b.toml"), ("HOME", "/home/ann")];
        assert_eq!(paths(Some("a.toml"), &variables, false), ["a.toml"]);
        assert_eq!(paths(None, &variables, false), ["/b.toml"]);
        assert_eq!(paths(None, &variables[1..], false), ["/home/ann/.config/gpupool/gpupool.toml", SYSTEM_FILE]);
        let moved = [("XDG_CONFIG_HOME", "/cfg"), ("HOME", "/home/ann"), ("GPUPOOL_CONFIG", " ")];
        assert_eq!(paths(None, &moved, false), ["/cfg/gpupool/gpupool.toml", SYSTEM_FILE]);
    }

    #[test]
    fn the_inputs_of_this_machine_can_be_loaded() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "[limits]\nconnections = 7").unwrap();
        let inputs = ConfigInputs::from_system(FlagValues::default(), Some(file.path()), ConfigConsumer::All).unwrap();
        assert_eq!(inputs.env.get("PATH"), std::env::var("PATH").ok().as_ref());
        assert!(!inputs.machine.host_name.is_empty());
        // The environment of the test run is not checked here.
        let loaded = crate::load_config(&ConfigInputs { env: BTreeMap::new(), ..inputs }).unwrap();
        assert_eq!(loaded.config.limits.connections, 7);
        assert!(loaded.config.server.state_dir.ends_with("gpupool"));
    }

    #[test]
    fn root_reads_no_file_of_a_home_directory() {
        assert_eq!(paths(None, &[("HOME", "/home/ann"), ("XDG_CONFIG_HOME", "/x")], true), [SYSTEM_FILE]);
    }

    #[test]
    fn a_named_file_must_exist_and_be_text() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str, is_required| ConfigFileCandidate { path: directory.path().join(name), is_required };
        assert_eq!(read_config_file(&at("missing.toml", false)), Ok(None));
        assert!(read_config_file(&at("missing.toml", true)).unwrap_err().to_string().contains("missing.toml"));
        fs::write(directory.path().join("latin.toml"), b"title = \"\xe9\"").unwrap();
        assert!(read_config_file(&at("latin.toml", false)).unwrap_err().to_string().contains("UTF-8"));
        assert!(read_config_file(&ConfigFileCandidate { path: directory.path().into(), is_required: false }).is_err());
    }

    #[test]
    fn a_port_in_use_is_reported_with_its_process() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let PortFact::InUse { by: Some(by) } = probe_port("127.0.0.1", port) else {
            panic!("port {port} is taken: {:?}", probe_port("127.0.0.1", port));
        };
        assert!(by.contains(&format!("(pid {})", std::process::id())), "{by}");
        assert_eq!(probe_port("127.0.0.1", 0), PortFact::Free);
        assert!(matches!(probe_port("203.0.113.1", 1), PortFact::Refused(_)));
    }

    #[test]
    fn files_are_reported_as_readable_or_unreadable() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key.pem");
        fs::write(&path, "key").unwrap();
        for (mode, others_can_read) in [(0o600, false), (0o644, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(inspect_file(&path), FileFact::Readable { path: path.clone(), others_can_read });
        }
        for absent in [directory.path().join("none.pem"), directory.path().to_path_buf()] {
            assert!(matches!(inspect_file(&absent), FileFact::Unreadable { .. }), "{}", absent.display());
        }
    }

    #[test]
    fn a_missing_directory_is_judged_by_its_nearest_ancestor() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(inspect_directory(&directory.path().join("a/b")).not_writable, None);
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(inspect_directory(&file.join("below")).not_writable.is_some_and(|why| why.contains("not a directory")));
    }

    #[test]
    fn a_directory_that_is_not_writable_is_reported() {
        if rustix::process::geteuid().is_root() {
            return skipped("a_directory_that_is_not_writable_is_reported", "root may write everywhere");
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o500)).unwrap();
        let fact = inspect_directory(&directory.path().join("state"));
        assert!(fact.not_writable.is_some_and(|why| why.contains("denied")));
    }
}
