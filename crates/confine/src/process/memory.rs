//! How much memory one process uses: cheaply, or fairly where it shares with others.

use super::ProcFs;

/// The bytes of a process that are in memory, those it shares with others included; none if it has gone.
pub(crate) fn resident(procfs: &ProcFs, pid: u32) -> u64 {
    let Ok(Some(text)) = procfs.read(pid, "statm") else { return 0 };
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0).saturating_mul(rustix::param::page_size() as u64)
}

/// The same with each shared page counted in proportion to how many share it. Takes the kernel long for large
/// processes. `None` where it may not be read (another user's process), is not told (old kernels), or the process has
/// gone.
pub(crate) fn proportional(procfs: &ProcFs, pid: u32) -> Option<u64> {
    kibibytes(&procfs.read(pid, "smaps_rollup").ok()??, "Pss:")
}

fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_and_nonsense_is_not() {
        assert_eq!(
            kibibytes("5600-7ff ---p 00 00:00 0 [rollup]\nRss: 900 kB\nPss:    123 kB\n", "Pss:"),
            Some(123 * 1024)
        );
        assert_eq!(kibibytes("Rss: 900 kB\n", "Pss:"), None);
        assert_eq!(kibibytes("Pss: 99999999999999999999 kB\n", "Pss:"), None);
    }

    #[test]
    fn what_this_process_has_in_memory_is_seen_both_ways() {
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let ours = std::process::id();
        let resident = resident(&ProcFs::here(), ours);
        assert!(resident >= block.len() as u64, "{resident}");
        // The kernel leaves something out now and then while other threads change what is mapped.
        let seen: Vec<_> = (0..20).map(|_| proportional(&ProcFs::here(), ours)).collect();
        assert!(seen.iter().any(|seen| seen.is_none_or(|bytes| bytes >= block.len() as u64)), "{seen:?}");
    }

    #[test]
    fn nobody_uses_nothing() {
        assert_eq!(resident(&ProcFs::here(), u32::MAX), 0);
        assert_eq!(proportional(&ProcFs::here(), u32::MAX), None);
    }
}
