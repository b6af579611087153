//! Changes to the machine that a test undoes when it ends: small disks, unwritable files, other users, and a separate wall
//! clock for an agent.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use tempfile::TempDir;

/// Two users without rights.
pub const ALICE: u32 = 54_321;
pub const BOB: u32 = 54_322;

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs a system command. The error is its output.
fn run_command(name: &str, arguments: &[&str]) -> Result<(), String> {
    let stderr = |output: Output| String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match Command::new(name).args(arguments).output() {
        Err(error) => Err(format!("{name}: {error}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{name}: {}", stderr(output))),
    }
}

/// A file system of a few MiB. Dropping it unmounts the file system.
pub struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    /// Mounts the file system. The error is the reason why it cannot.
    pub fn new(mib: u32) -> Result<Self, String> {
        let folder = TempDir::with_prefix("gpupool-disk-").unwrap();
        let path = folder.path().to_str().unwrap();
        run_command("mount", &["-t", "tmpfs", "-o", &format!("size={mib}m"), "gpupool-test", path])?;
        Ok(Self { folder })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Fills the remaining space with a file, and returns its path.
    pub fn fill(&self) -> PathBuf {
        let path = self.path().join("filler");
        let mut file = std::fs::File::create(&path).unwrap();
        let full = io::copy(&mut io::repeat(1), &mut file).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = run_command("umount", &["-l", self.folder.path().to_str().unwrap()]);
    }
}

/// An immutable file, unwritable even for processes that have it open. Dropping this makes it writable again.
pub struct UnwritableFile {
    path: PathBuf,
}

impl UnwritableFile {
    /// Makes the file immutable. The error is the reason why it cannot.
    pub fn make(path: &Path) -> Result<Self, String> {
        run_command("chattr", &["+i", path.to_str().unwrap()])?;
        Ok(Self { path: path.to_owned() })
    }
}

impl Drop for UnwritableFile {
    fn drop(&mut self) {
        let _ = run_command("chattr", &["-i", self.path.to_str().unwrap()]);
    }
}

/// Returns a directory that other users can enter.
pub fn accessible_directory() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    folder
}

/// Runs `work` as another user, in a separate thread. Only for root.
pub fn as_user<T: Send + 'static>(uid: u32, work: impl FnOnce() -> T + Send + 'static) -> T {
    use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};
    let change = move || {
        set_thread_groups(&[]).unwrap();
        set_thread_gid(Gid::from_raw(uid)).unwrap();
        set_thread_uid(Uid::from_raw(uid)).unwrap();
        work()
    };
    std::thread::spawn(change).join().unwrap()
}

/// Returns an address of this machine that is not loopback.
pub fn network_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // No data is sent: the kernel only chooses the local address.
    socket.connect("203.0.113.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// A wall clock for one agent that can be set. Other clocks are unchanged.
#[derive(Clone)]
pub struct WallClock {
    folder: Arc<TempDir>,
}

/// A library that adds the seconds in a file to the wall clock.
const PRELOADED: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *at) {
    int done = syscall(SYS_clock_gettime, clock, at);
    if (done != 0 || clock != CLOCK_REALTIME) return done;
    char text[32] = {0};
    int file = open(getenv("WALL_CLOCK_AHEAD"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return done;
    if (read(file, text, sizeof text - 1) > 0) at->tv_sec += atol(text);
    close(file);
    return done;
}
"#;

impl WallClock {
    /// Compiles the preloaded library with the compiler that Rust links with.
    pub fn new() -> Self {
        let folder = TempDir::with_prefix("gpupool-clock-").unwrap();
        let (source, library) = (folder.path().join("clock.c"), folder.path().join("clock.so"));
        std::fs::write(&source, PRELOADED).unwrap();
        let names = [source.to_str().unwrap(), library.to_str().unwrap()];
        run_command("cc", &["-shared", "-fPIC", "-O1", names[0], "-o", names[1]]).unwrap();
        let clock = Self { folder: Arc::new(folder) };
        clock.set_ahead(0);
        clock
    }

    /// Sets the clock this many seconds ahead of the machine.
    pub fn set_ahead(&self, secs: i64) {
        let new = self.folder.path().join("new");
        std::fs::write(&new, secs.to_string()).unwrap();
        std::fs::rename(new, self.ahead()).unwrap();
    }

    fn ahead(&self) -> PathBuf {
        self.folder.path().join("ahead")
    }

    /// Returns the environment variables for an agent that uses this clock.
    pub fn variables(&self) -> [(&'static str, String); 2] {
        let library = self.folder.path().join("clock.so");
        [("LD_PRELOAD", library.display().to_string()), ("WALL_CLOCK_AHEAD", self.ahead().display().to_string())]
    }
}
