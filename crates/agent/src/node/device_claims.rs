//! Claims on the cards of this machine, so that only one agent leases each of them.
//!
//! A claim is a lock (`flock`) on a file of the card in a directory that all users reach. The kernel releases it when the agent
//! ends. The system agent, which runs as root or as the user that root gave the directory to, holds a second lock on a
//! file that others cannot open. Other agents find that lock in `/proc/locks` and yield to it, so no user can keep the
//! system agent from leasing a card by holding the first lock: the system agent reports the rival and goes on.
//!
//! Everything in the directory may come from a hostile user. A file that cannot be locked counts as a claim of its owner.
//! The system agent replaces such a file. The text in a file is for people and is never read. Between agents of ordinary
//! users claims are cooperative.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpupool_core::DeviceHealth;
use gpupool_devices::{DetectedDevice, DevicePartition};
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, fchmod, flock, fstat, major, minor, mkdir, open, openat,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;

/// The time between two checks of all claims.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The time that an agent waits for its predecessor after its start, and that others leave the system agent to restart.
const RESTART_TIME: Duration = Duration::from_secs(10);
/// The variable with another directory, for tests.
const DIRECTORY_VARIABLE: &str = "GPUPOOL_CLAIMS";
/// The directory of the system agent. Only root decides about its owner.
const SYSTEM_DIRECTORY: &str = "/run/gpupool/claims";
/// The directories where there is none of the system agent.
const SHARED_DIRECTORIES: [&str; 2] = ["/dev/shm/gpupool-claims", "/tmp/gpupool-claims"];
/// The mode of the directory: all users create files, and remove only their own.
const DIRECTORY_MODE: u32 = 0o1777;
/// The longest name of a card; longer ones are cut.
const MAX_CARD_NAME: usize = 128;

/// The claims of an agent.
#[derive(Debug)]
pub(super) struct DeviceClaims {
    candidates: Vec<DirectoryCandidate>,
    directory: Option<ClaimDirectory>,
    uid: u32,
    started: Instant,
    next_check: Instant,
    cards: BTreeMap<String, CardClaim>,
}

/// A directory that may be used for claims.
#[derive(Debug, Clone)]
struct DirectoryCandidate {
    path: PathBuf,
    /// Whether only root can have chosen the owner of the directory.
    owner_is_appointed: bool,
}

/// The claim on one card.
#[derive(Debug)]
struct CardClaim {
    /// The file that agents of all users lock.
    shared_lock: Option<File>,
    /// The file that only a system agent can lock.
    system_lock: Option<File>,
    /// The time at which the system agent was last seen to claim the card.
    system_seen_at: Option<Instant>,
    state: ClaimState,
}

/// The state of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ClaimState {
    /// This agent has it.
    Held,
    /// This agent is the system's, and leases the card although another agent claims it.
    Disputed(ClaimHolder),
    /// Another agent has it.
    Elsewhere(ClaimHolder),
    /// The claim cannot be made or checked; the text is the reason.
    Unchecked(String),
}

/// The agent that has a claim, as far as the kernel tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClaimHolder {
    uid: Option<u32>,
    pid: Option<u32>,
}

/// The result of locking a file.
enum LockOutcome {
    Locked(File),
    HeldBy(ClaimHolder),
}

/// A file of a card that was opened, or the owner of something that is no usable file.
enum OpenedFile {
    Usable(File),
    ForeignTo(u32),
}

impl DeviceClaims {
    /// Returns an agent's claims, which are none yet.
    pub(super) fn new() -> Self {
        let candidates = match std::env::var_os(DIRECTORY_VARIABLE) {
            Some(path) => vec![DirectoryCandidate { path: path.into(), owner_is_appointed: false }],
            None => {
                let system = DirectoryCandidate { path: SYSTEM_DIRECTORY.into(), owner_is_appointed: true };
                let shared =
                    SHARED_DIRECTORIES.map(|path| DirectoryCandidate { path: path.into(), owner_is_appointed: false });
                std::iter::once(system).chain(shared).collect()
            }
        };
        Self::in_directories(candidates, rustix::process::geteuid().as_raw())
    }

    fn in_directories(candidates: Vec<DirectoryCandidate>, uid: u32) -> Self {
        let now = Instant::now();
        Self { candidates, directory: None, uid, started: now, next_check: now, cards: BTreeMap::new() }
    }

    /// Claims the given cards, gives up the claims on all others, and checks the claims if that is due.
    pub(super) fn update(&mut self, cards: &BTreeSet<String>, now: Instant) {
        self.cards.retain(|card, _| cards.contains(card));
        let is_new = cards.iter().any(|card| !self.cards.contains_key(card));
        let yields = self.cards.values().any(|claim| matches!(claim.state, ClaimState::Elsewhere(_)));
        let may_be_predecessor = yields && now.saturating_duration_since(self.started) < RESTART_TIME;
        if cards.is_empty() || !(is_new || may_be_predecessor || now >= self.next_check) {
            return;
        }
        self.next_check = now + CHECK_INTERVAL;
        if let Err(error) = self.open_directory() {
            for card in cards {
                let claim = self.cards.entry(card.clone()).or_insert_with(CardClaim::new);
                claim.change_state(card, ClaimState::Unchecked(error.clone()));
            }
            return;
        }
        let Some(directory) = &self.directory else { return };
        let locks = LockTable::read();
        for card in cards {
            let claim = self.cards.entry(card.clone()).or_insert_with(CardClaim::new);
            let state = directory.check_claim(card, claim, &locks, now);
            claim.change_state(card, state.unwrap_or_else(|error| ClaimState::Unchecked(error.to_string())));
        }
    }

    /// Returns the health of a device of this card: a healthy one that another agent claims is closed here.
    pub(super) fn health_of(&self, card: &str, health: &DeviceHealth) -> DeviceHealth {
        match (health, self.cards.get(card).map(|claim| &claim.state)) {
            (DeviceHealth::Healthy, Some(ClaimState::Elsewhere(holder))) => {
                DeviceHealth::ClaimedElsewhere(holder.to_string().into())
            }
            _ => health.clone(),
        }
    }

    /// Returns the findings about agents that claim the same cards, for people. They name no process: everyone may read
    /// them.
    pub(super) fn findings(&self, now: Instant) -> Vec<String> {
        let starts = now.saturating_duration_since(self.started) < RESTART_TIME;
        let finding = |(card, claim): (&String, &CardClaim)| match &claim.state {
            ClaimState::Held => None,
            ClaimState::Disputed(rival) => Some(format!(
                "card {card}: {} claims it, too; this agent leases it because it is the system's; end the other agent",
                rival.without_pid()
            )),
            // This may be the predecessor, which ends.
            ClaimState::Elsewhere(holder) if starts && holder.uid == Some(self.uid) => None,
            ClaimState::Elsewhere(holder) => {
                Some(format!("card {card}: {} leases it; this agent only reports its statistics", holder.without_pid()))
            }
            ClaimState::Unchecked(error) => Some(format!(
                "card {card}: it cannot be claimed ({error}); make sure that no other agent on this machine leases it"
            )),
        };
        self.cards.iter().filter_map(finding).collect()
    }

    /// Opens the first usable directory. Claims in another one are given up: a better one has appeared, or this one was
    /// replaced.
    fn open_directory(&mut self) -> Result<(), String> {
        let mut errors = Vec::new();
        for candidate in &self.candidates {
            match ClaimDirectory::open(candidate, self.uid) {
                Ok(opened) => {
                    if self.directory.as_ref().is_none_or(|directory| directory.id != opened.id) {
                        self.cards.values_mut().for_each(CardClaim::unlock);
                        self.directory = Some(opened);
                    }
                    return Ok(());
                }
                Err(error) => errors.push(format!("{}: {error}", candidate.path.display())),
            }
        }
        self.cards.values_mut().for_each(CardClaim::unlock);
        self.directory = None;
        Err(errors.join("; "))
    }
}

impl CardClaim {
    fn new() -> Self {
        Self { shared_lock: None, system_lock: None, system_seen_at: None, state: ClaimState::Held }
    }

    fn unlock(&mut self) {
        (self.shared_lock, self.system_lock) = (None, None);
    }

    fn change_state(&mut self, card: &str, state: ClaimState) {
        if self.state == state {
            return;
        }
        match &state {
            ClaimState::Held => tracing::info!(card, "this agent leases the card"),
            ClaimState::Disputed(rival) => tracing::warn!(card, "{rival} claims the card, too; this agent leases it"),
            ClaimState::Elsewhere(holder) => tracing::warn!(card, "{holder} leases the card; this agent does not"),
            ClaimState::Unchecked(error) => tracing::warn!(card, "the card cannot be claimed: {error}"),
        }
        self.state = state;
    }
}

impl ClaimHolder {
    fn without_pid(self) -> Self {
        Self { pid: None, ..self }
    }
}

impl fmt::Display for ClaimHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.uid, self.pid) {
            (Some(uid), Some(pid)) => write!(f, "the agent of uid {uid} (pid {pid})"),
            (Some(uid), None) => write!(f, "the agent of uid {uid}"),
            (None, Some(pid)) => write!(f, "another agent (pid {pid})"),
            (None, None) => f.write_str("another agent"),
        }
    }
}

/// Returns the name of the card that a device is, or is a part of.
pub(super) fn card_of(device: &DetectedDevice, identity: &gpupool_core::DeviceIdentity) -> String {
    if let Some(address) = device.pci {
        return address.to_string();
    }
    let parent = match &device.partition {
        Some(DevicePartition::Mig { parent_uuid, .. }) => parent_uuid.as_ref(),
        _ => None,
    };
    let name = parent.or(device.uuid.as_ref()).map_or_else(|| identity.to_string(), ToString::to_string);
    let allowed = |sign: char| if sign.is_ascii_alphanumeric() || "-_:".contains(sign) { sign } else { '_' };
    name.chars().take(MAX_CARD_NAME).map(allowed).collect()
}

/// The directory with the files that are locked.
#[derive(Debug)]
struct ClaimDirectory {
    folder: File,
    /// Device and inode.
    id: (u64, u64),
    uid: u32,
    /// Whether this agent is the system's.
    is_system: bool,
    /// The owner of the directory, if root appointed it.
    appointed_owner: Option<u32>,
}

impl ClaimDirectory {
    /// Opens a directory, and creates it if that is allowed.
    fn open(candidate: &DirectoryCandidate, uid: u32) -> io::Result<Self> {
        let path = candidate.path.as_path();
        let folder = match open_folder(path) {
            Err(Errno::NOENT) => {
                create_folder(path, candidate.owner_is_appointed)?;
                open_folder(path)?
            }
            opened => opened?,
        };
        let stat = fstat(&folder)?;
        if Mode::from_raw_mode(stat.st_mode).as_raw_mode() & DIRECTORY_MODE != DIRECTORY_MODE {
            // The umask took something away, or a service manager created it.
            fchmod(&folder, Mode::from_raw_mode(DIRECTORY_MODE))
                .map_err(|error| io::Error::other(format!("its mode is not {DIRECTORY_MODE:o} ({error})")))?;
        }
        let appointed_owner = candidate.owner_is_appointed.then_some(stat.st_uid);
        let is_system = uid == 0 || appointed_owner == Some(uid);
        Ok(Self { folder, id: file_id(&stat), uid, is_system, appointed_owner })
    }

    /// Makes or checks the claim on a card, and returns its state.
    fn check_claim(
        &self,
        card: &str,
        claim: &mut CardClaim,
        locks: &LockTable,
        now: Instant,
    ) -> io::Result<ClaimState> {
        let system_name = format!("{card}.system");
        if self.is_system {
            match self.lock(&system_name, 0o600, claim.system_lock.take(), locks)? {
                LockOutcome::Locked(file) => claim.system_lock = Some(file),
                LockOutcome::HeldBy(holder) => {
                    claim.unlock();
                    return Ok(ClaimState::Elsewhere(holder));
                }
            }
        } else if let Some(holder) = self.system_holder(&system_name, locks) {
            claim.unlock();
            claim.system_seen_at = Some(now);
            return Ok(ClaimState::Elsewhere(holder));
        } else if claim.system_seen_at.is_some_and(|seen| now.saturating_duration_since(seen) < RESTART_TIME) {
            return Ok(claim.state.clone());
        }
        Ok(match self.lock(card, 0o666, claim.shared_lock.take(), locks)? {
            LockOutcome::Locked(file) => {
                claim.shared_lock = Some(file);
                ClaimState::Held
            }
            LockOutcome::HeldBy(rival) if self.is_system => ClaimState::Disputed(rival),
            LockOutcome::HeldBy(holder) => ClaimState::Elsewhere(holder),
        })
    }

    /// Locks a file of a card, unless `held` is that file and locked already.
    fn lock(&self, name: &str, mode: u32, held: Option<File>, locks: &LockTable) -> io::Result<LockOutcome> {
        if let Some(held) = held
            && self.is_current(name, &held)?
        {
            return Ok(LockOutcome::Locked(held));
        }
        // Another agent may replace the file at the same time.
        for _ in 0..3 {
            let file = match self.open_file(name, mode)? {
                Some(OpenedFile::Usable(file)) => file,
                Some(OpenedFile::ForeignTo(owner)) if self.may_replace(name, owner, locks) => {
                    self.remove(name)?;
                    continue;
                }
                Some(OpenedFile::ForeignTo(owner)) => {
                    return Ok(LockOutcome::HeldBy(ClaimHolder { uid: Some(owner), pid: None }));
                }
                None => continue,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if self.is_current(name, &file)? => {
                    // The text is only information: a full disk must not prevent a claim.
                    let _ = self.write_text(&file);
                    return Ok(LockOutcome::Locked(file));
                }
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    // The lock may be newer than the table.
                    let (id, none) = (file_id(&fstat(&file)?), ClaimHolder { uid: None, pid: None });
                    let holder = locks.holder_of(id).or_else(|| LockTable::read().holder_of(id));
                    return Ok(LockOutcome::HeldBy(holder.unwrap_or(none)));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!("{name} is replaced again and again")))
    }

    /// Opens a file that only this directory contains; `None` if it changed at the same time.
    fn open_file(&self, name: &str, mode: u32) -> io::Result<Option<OpenedFile>> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Not created by the same call: the kernel refuses that for files of others in such a directory.
        match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(opened) => {
                let stat = fstat(&opened)?;
                let is_own = mode != 0o600 || (stat.st_uid == self.uid && stat.st_mode & 0o077 == 0);
                let is_plain = FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_nlink == 1;
                if !is_own || !is_plain {
                    return Ok(Some(OpenedFile::ForeignTo(stat.st_uid)));
                }
                Ok(Some(OpenedFile::Usable(opened.into())))
            }
            Err(Errno::NOENT) => {
                let create = flags | OFlags::CREATE | OFlags::EXCL;
                match openat(&self.folder, name, create, Mode::from_raw_mode(mode)) {
                    Ok(created) => {
                        fchmod(&created, Mode::from_raw_mode(mode))?;
                        Ok(Some(OpenedFile::Usable(created.into())))
                    }
                    Err(Errno::EXIST) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
            Err(error) => match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => Ok(Some(OpenedFile::ForeignTo(stat.st_uid))),
                Err(Errno::NOENT) => Ok(None),
                Err(_) => Err(error.into()),
            },
        }
    }

    /// Whether something that is no usable file may be removed. The locked file of another system agent stays.
    fn may_replace(&self, name: &str, owner: u32, locks: &LockTable) -> bool {
        owner == self.uid || (self.is_system && (self.uid == 0 || self.system_holder(name, locks).is_none()))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => match unlinkat(&self.folder, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::EXIST) => {
                    let aside = format!("removed-{}-{name}", std::process::id());
                    Ok(renameat(&self.folder, name, &self.folder, aside)?)
                }
                removed => Ok(removed?),
            },
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a name still belongs to an open file.
    fn is_current(&self, name: &str, file: &File) -> io::Result<bool> {
        match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(file_id(&stat) == file_id(&fstat(file)?)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the system agent that holds a card's lock for system agents. Only the owner of that file can lock it.
    fn system_holder(&self, system_name: &str, locks: &LockTable) -> Option<ClaimHolder> {
        let stat = statat(&self.folder, system_name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let is_trusted = stat.st_uid == 0 || Some(stat.st_uid) == self.appointed_owner;
        let is_private = stat.st_mode & 0o077 == 0 && stat.st_nlink == 1;
        if !(is_trusted && is_private && FileType::from_raw_mode(stat.st_mode).is_file()) {
            return None;
        }
        locks.holder_of(file_id(&stat)).map(|holder| ClaimHolder { uid: Some(stat.st_uid), ..holder })
    }

    fn write_text(&self, mut file: &File) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        let started = process_start().map_or_else(|| "unknown".to_owned(), |ticks| ticks.to_string());
        write!(file, "uid {}\npid {}\nstarted {started}\n", self.uid, std::process::id())
    }
}

fn open_folder(path: &Path) -> Result<File, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map(File::from)
}

/// Creates a directory for all users, and its parent for the system's.
fn create_folder(path: &Path, is_system: bool) -> Result<(), Errno> {
    if let (true, Some(parent)) = (is_system, path.parent())
        && mkdir(parent, Mode::from_raw_mode(0o755)).is_ok()
    {
        fchmod(open_folder(parent)?, Mode::from_raw_mode(0o755))?;
    }
    match mkdir(path, Mode::from_raw_mode(DIRECTORY_MODE)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

fn file_id(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Returns the time at which this process started, in ticks since the boot.
fn process_start() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The locks of the machine, as the kernel lists them. Locks of processes in other PID namespaces are missing.
#[derive(Debug, Default)]
struct LockTable {
    text: String,
}

impl LockTable {
    fn read() -> Self {
        Self { text: std::fs::read_to_string("/proc/locks").unwrap_or_default() }
    }

    /// Returns the process that holds the lock of a file.
    fn holder_of(&self, (device, inode): (u64, u64)) -> Option<ClaimHolder> {
        let wanted = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
        // `7: FLOCK ADVISORY WRITE 4711 00:1a:123 0 EOF`; a waiting process has `->` after the number.
        let pid = self.text.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let is_held = words.next() == Some("FLOCK");
            let pid = words.nth(2)?;
            (is_held && words.next() == Some(&*wanted)).then(|| pid.parse::<u32>().ok())?
        })?;
        Some(ClaimHolder { uid: uid_of(pid), pid: Some(pid) })
    }
}

/// Returns the effective uid of a process.
fn uid_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    const CARD: &str = "0000:18:00.0";
    const STRANGER: u32 = 54_321;

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// Returns a folder on a file system whose locks the kernel lists under the same device number.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
    }

    fn claims(folder: &tempfile::TempDir, uid: u32) -> DeviceClaims {
        let path = folder.path().join("claims");
        let mut claims =
            DeviceClaims::in_directories(vec![DirectoryCandidate { path, owner_is_appointed: false }], uid);
        update(&mut claims, 0);
        claims
    }

    /// Checks the claim of the card as if it were so many seconds after the start.
    fn update(claims: &mut DeviceClaims, secs: u64) -> ClaimState {
        let now = claims.started + Duration::from_secs(secs);
        claims.update(&BTreeSet::from([CARD.to_owned()]), now);
        claims.cards[CARD].state.clone()
    }

    fn me() -> ClaimHolder {
        ClaimHolder { uid: Some(rustix::process::geteuid().as_raw()), pid: Some(std::process::id()) }
    }

    fn make_directory(folder: &tempfile::TempDir) -> PathBuf {
        let path = folder.path().join("claims");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o1777)).unwrap();
        path
    }

    #[test]
    fn one_of_two_users_has_a_card_and_the_other_takes_over_when_it_ends() {
        let folder = folder();
        let mut first = claims(&folder, 1_001);
        assert_eq!(update(&mut first, 0), ClaimState::Held);
        let mut second = claims(&folder, 1_002);
        assert_eq!(update(&mut second, 20), ClaimState::Elsewhere(me()));
        let health = second.health_of(CARD, &DeviceHealth::Healthy);
        let text = format!("the agent of uid {} (pid {})", me().uid.unwrap(), std::process::id());
        assert_eq!(health, DeviceHealth::ClaimedElsewhere(text.as_str().into()));
        assert_eq!(second.health_of(CARD, &DeviceHealth::Lost), DeviceHealth::Lost);
        let findings = second.findings(second.started + Duration::from_secs(20));
        assert!(findings[0].contains("only reports its statistics") && !findings[0].contains("pid"), "{findings:?}");
        drop(first);
        assert_eq!(update(&mut second, 21), ClaimState::Elsewhere(me()), "the next check is not due");
        assert_eq!(update(&mut second, 22), ClaimState::Held);
        assert_eq!(second.findings(second.started), Vec::<String>::new());
        let file = folder.path().join("claims").join(CARD);
        let (text, mode) = (std::fs::read_to_string(&file).unwrap(), std::fs::metadata(&file).unwrap().mode());
        assert!(text.starts_with(&format!("uid 1002\npid {}\nstarted ", std::process::id())), "{text}");
        assert_eq!(
            (mode & 0o7777, std::fs::metadata(folder.path().join("claims")).unwrap().mode() & 0o7777),
            (0o666, 0o1777)
        );
    }

    #[test]
    fn a_predecessor_is_awaited_at_the_start_without_a_finding() {
        let folder = folder();
        let first = claims(&folder, me().uid.unwrap());
        let mut second = claims(&folder, me().uid.unwrap());
        assert!(matches!(second.cards[CARD].state, ClaimState::Elsewhere(_)));
        assert_eq!(second.findings(second.started), Vec::<String>::new());
        assert_eq!(second.findings(second.started + RESTART_TIME).len(), 1);
        drop(first);
        assert_eq!(update(&mut second, 1), ClaimState::Held, "it is checked in each round");
    }

    #[test]
    fn the_system_agent_takes_a_card_from_a_user_and_the_user_yields() {
        if !is_root() {
            return;
        }
        let folder = folder();
        let mut user = claims(&folder, STRANGER);
        let mut system = claims(&folder, 0);
        assert_eq!(update(&mut system, 0), ClaimState::Disputed(me()));
        assert_eq!(system.health_of(CARD, &DeviceHealth::Healthy), DeviceHealth::Healthy);
        assert!(system.findings(system.started)[0].contains("end the other agent"));
        assert_eq!(update(&mut user, 2), ClaimState::Elsewhere(me()));
        assert_eq!(update(&mut system, 2), ClaimState::Held);
        let second = claims(&folder, 0);
        assert_eq!(second.cards[CARD].state, ClaimState::Elsewhere(me()), "two system agents do not both lease");
        drop((second, system));
        assert_eq!(update(&mut user, 4), ClaimState::Elsewhere(me()), "the system agent may restart");
        assert_eq!(update(&mut user, 14), ClaimState::Held);
    }

    #[test]
    fn hostile_files_are_claims_of_their_owners_and_the_system_agent_replaces_them() {
        if !is_root() {
            return;
        }
        type Trap = fn(&Path);
        let traps: [(&str, Trap); 5] = [
            ("a link", |file| symlink(file.with_file_name("victim"), file).unwrap()),
            ("a second name", |file| std::fs::hard_link(file.with_file_name("victim"), file).unwrap()),
            ("a directory", |file| std::fs::create_dir(file).unwrap()),
            ("a full directory", |file| std::fs::create_dir_all(file.join("more")).unwrap()),
            ("a pipe", |file| {
                let made = std::process::Command::new("mkfifo").arg(file).status().unwrap();
                assert!(made.success());
            }),
        ];
        for (name, trap) in traps {
            for suffix in ["", ".system"] {
                let folder = folder();
                let path = make_directory(&folder);
                std::fs::write(path.join("victim"), "precious").unwrap();
                let file = path.join(format!("{CARD}{suffix}"));
                trap(&file);
                std::os::unix::fs::lchown(&file, Some(STRANGER), None).unwrap();
                let user = claims(&folder, 1_002);
                let expected = match suffix {
                    "" => ClaimState::Elsewhere(ClaimHolder { uid: Some(STRANGER), pid: None }),
                    _ => ClaimState::Held,
                };
                assert_eq!(user.cards[CARD].state, expected, "{name}{suffix}");
                drop(user);
                let system = claims(&folder, 0);
                assert_eq!(system.cards[CARD].state, ClaimState::Held, "{name}{suffix}");
                assert_eq!(std::fs::read_to_string(path.join("victim")).unwrap(), "precious", "{name}{suffix}");
            }
        }
    }

    #[test]
    fn text_in_a_file_is_not_believed_and_a_file_that_is_locked_for_ever_does_not_stop_the_system_agent() {
        if !is_root() {
            return;
        }
        let folder = folder();
        let path = make_directory(&folder);
        std::fs::write(path.join(CARD), "uid 0\npid 1\nstarted 0\n".repeat(1_000)).unwrap();
        let held = File::open(path.join(CARD)).unwrap();
        flock(&held, FlockOperation::NonBlockingLockShared).unwrap();
        let mut system = claims(&folder, 0);
        assert_eq!(system.cards[CARD].state, ClaimState::Disputed(me()));
        assert_eq!(update(&mut system, 60), ClaimState::Disputed(me()));
        // A lock for system agents that a user made is none.
        let fake = path.join("0000:19:00.0.system");
        std::fs::write(&fake, "uid 0").unwrap();
        std::fs::set_permissions(&fake, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&fake, Some(STRANGER), None).unwrap();
        let fake = File::open(&fake).unwrap();
        flock(&fake, FlockOperation::NonBlockingLockExclusive).unwrap();
        let mut user = claims(&folder, 1_002);
        user.update(&BTreeSet::from(["0000:19:00.0".to_owned()]), user.started);
        assert_eq!(user.cards["0000:19:00.0"].state, ClaimState::Held);
    }

    #[test]
    fn a_replaced_file_is_claimed_again_and_a_directory_that_others_cannot_use_is_reported() {
        let folder = folder();
        let mut first = claims(&folder, me().uid.unwrap());
        let path = folder.path().join("claims");
        std::fs::remove_file(path.join(CARD)).unwrap();
        assert_eq!(update(&mut first, 2), ClaimState::Held);
        assert!(path.join(CARD).exists());
        std::fs::remove_dir_all(&path).unwrap();
        assert_eq!(update(&mut first, 4), ClaimState::Held);
        assert!(path.join(CARD).exists(), "a directory that was removed is made again");
        std::fs::remove_dir_all(&path).unwrap();
        symlink(folder.path(), &path).unwrap();
        assert!(matches!(update(&mut first, 6), ClaimState::Unchecked(_)));
        assert_eq!(first.health_of(CARD, &DeviceHealth::Healthy), DeviceHealth::Healthy);
        assert!(first.findings(first.started)[0].contains("cannot be claimed"));
        assert!(!folder.path().join(CARD).exists());
    }

    #[test]
    fn a_better_directory_is_used_as_soon_as_it_appears() {
        let folder = folder();
        let candidate =
            |name: &str, owner_is_appointed| DirectoryCandidate { path: folder.path().join(name), owner_is_appointed };
        let both = vec![candidate("no/run/claims", true), candidate("claims", false)];
        let mut user = DeviceClaims::in_directories(both, 1_001);
        assert_eq!(update(&mut user, 0), ClaimState::Held);
        std::fs::create_dir_all(folder.path().join("no/run")).unwrap();
        let system = DeviceClaims::in_directories(vec![candidate("no/run/claims", true)], me().uid.unwrap());
        let mut system = system;
        assert_eq!(update(&mut system, 0), ClaimState::Held);
        assert_eq!(update(&mut user, 2), ClaimState::Elsewhere(me()));
    }

    #[test]
    fn partitions_share_the_claim_of_their_card() {
        let identity = gpupool_core::DeviceIdentity::Uuid("../x y".into());
        let mut device = DetectedDevice::new(gpupool_core::Vendor::Nvidia);
        assert_eq!(card_of(&device, &identity), "___x_y");
        device.uuid = Some("MIG-1".into());
        assert_eq!(card_of(&device, &identity), "MIG-1");
        device.partition = Some(DevicePartition::Mig {
            parent_uuid: Some("GPU-1".into()),
            gpu_instance: Some(1),
            compute_instance: None,
            profile: None,
        });
        assert_eq!(card_of(&device, &identity), "GPU-1");
        device.pci = gpupool_devices::parse_pci_address("18:00.0");
        assert_eq!(card_of(&device, &identity), CARD);
    }

    #[test]
    fn the_table_of_locks_is_read_as_the_kernel_writes_it() {
        let text = "1: POSIX  ADVISORY  WRITE 7 00:1a:5 0 EOF\n2: FLOCK  ADVISORY  WRITE 4294967 00:1a:6 0 EOF\n\
                    2: -> FLOCK  ADVISORY  WRITE 8 00:1a:5 0 EOF\nnonsense\n\n";
        let table = LockTable { text: text.into() };
        let id = |inode| (rustix::fs::makedev(0, 0x1a), inode);
        assert_eq!(table.holder_of(id(6)), Some(ClaimHolder { uid: None, pid: Some(4_294_967) }));
        assert_eq!(table.holder_of(id(5)), None);
        assert_eq!(LockTable::default().holder_of(id(6)), None);
    }
}
