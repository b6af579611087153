//! Checks of the command of `run` and `map` before a GPU is requested, and the variables that it does not get.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{env, io};

use gpupool_confine::spawn::SpawnError;
use rustix::fs::{Access, access};

/// Variables that a command gets only with `--keep-token`.
pub(crate) const SECRET_VARIABLES: [&str; 1] = ["GPUPOOL_TOKEN"];

/// Returns the variables to remove from the environment of a command.
pub(crate) fn hidden_variables(keep_token: bool) -> &'static [&'static str] {
    if keep_token { &[] } else { &SECRET_VARIABLES }
}

/// Checks that a program exists and can be executed, as the kernel and the search in `PATH` will find it.
pub(crate) fn check_program(program: &OsStr) -> Result<(), SpawnError> {
    let paths: Vec<PathBuf> = if program.as_encoded_bytes().contains(&b'/') {
        vec![program.into()]
    } else {
        let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
        env::split_paths(&path).map(|dir| dir.join(program)).collect()
    };
    let mut failure = SpawnError::NotFound { program: program.to_owned() };
    for path in paths.iter().filter(|path| !program.is_empty() && path.exists()) {
        match check_executable(path) {
            Ok(()) => return Ok(()),
            Err(source) => failure = SpawnError::NotExecutable { program: program.to_owned(), source },
        }
    }
    Err(failure)
}

fn check_executable(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(access(path, Access::EXEC_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let code = |program: &str| check_program(OsStr::new(program)).map_err(|error| error.exit_code());
        assert_eq!((code("sh"), code("/bin/sh")), (Ok(()), Ok(())));
        assert_eq!((code("no-such-program"), code("/nonexistent/program"), code("")), (Err(127), Err(127), Err(127)));
        assert_eq!((code("/etc/passwd"), code("/etc")), (Err(126), Err(126)));
    }
}
