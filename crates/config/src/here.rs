//! Gathers what a configuration is made of on this machine: the environment, the file, who runs it.
//!
//! The file is never looked for in the working directory: a foreign directory must not be able to open the agent.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::limits;
use crate::load::{Flags, Inputs, Reader};
use crate::problem::{Problem, Problems};
use crate::setting::Machine;

/// The variable that names the file.
pub const CONFIG_VARIABLE: &str = "GPUPOOL_CONFIG";
/// The file of the machine.
pub const SYSTEM_FILE: &str = "/etc/gpupool/gpupool.toml";

impl Inputs {
    /// What this machine gives: `flags`, the environment, and the file. `named` is the file of `--config`, which must
    /// exist as the one in `GPUPOOL_CONFIG` must; the user's and the machine's own file may be missing.
    pub fn here(flags: Flags, named: Option<&Path>, reader: Reader) -> Result<Self, Problems> {
        let env: BTreeMap<String, String> = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        let machine = Machine::here(&env);
        let mut file = None;
        for place in places(named, &env, machine.root) {
            if let Some(text) = read(&place)? {
                file = Some((place.path, text));
                break;
            }
        }
        Ok(Self { flags, env, file, machine, reader, lenient: false })
    }
}

impl Machine {
    fn here(env: &BTreeMap<String, String>) -> Self {
        let told = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
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
fn read(place: &Place) -> Result<Option<String>, Problems> {
    let unreadable = |said: String| Problems(vec![Problem::Unreadable { path: place.path.clone(), said }]);
    let file = match std::fs::File::open(&place.path) {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        std::fs::write(file.path(), "[limits]\nconnections = 7").unwrap();
        let inputs = Inputs::here(Flags::default(), Some(file.path()), Reader::Everybody).unwrap();
        assert_eq!(inputs.env.get("PATH"), std::env::var("PATH").ok().as_ref());
        assert!(!inputs.machine.host_name.is_empty());
        // The environment of whoever runs this test is not judged here.
        let loaded = crate::load(&Inputs { env: BTreeMap::new(), ..inputs }).unwrap();
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
        std::fs::write(directory.path().join("latin.toml"), b"title = \"\xe9\"").unwrap();
        assert!(read(&at("latin.toml", false)).unwrap_err().to_string().contains("UTF-8"));
        assert!(read(&Place { path: directory.path().into(), named: false }).is_err());
    }
}
