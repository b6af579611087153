//! Several runs of `nvidia-smi` in one text, each under a heading that names its command.
//!
//! Any decoration makes a heading: `$ nvidia-smi -L`, `# nvidia-smi -q`, `=== nvidia-smi topo -m ===`. What one run
//! tells is added to what the others tell. Of runs of the same command (idle and under load, say) the first is taken.
//! What stands before the first heading is a run as well, where it looks like one.

use std::collections::HashSet;

use super::{FORMS, Form, help, list, mig, topo};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::words;

/// What people call this form.
pub(super) const NAME: &str = "several runs of nvidia-smi";

/// Whether a text has such a heading with such an answer below it.
pub fn looks_like(text: &str) -> bool {
    text.lines().any(|line| heading(line).is_some()) && split(text).iter().any(|section| form(&section.body).is_some())
}

/// The devices of all runs together.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut asked = HashSet::new();
    let mut answers: Vec<(usize, Snapshot)> = Vec::new();
    let mut failed: Vec<(String, SourceError)> = Vec::new();
    for section in split(text) {
        let Some((rank, form)) = form(&section.body).filter(|(_, form)| form.name != help::NAME) else { continue };
        if !asked.insert(section.command) {
            continue;
        }
        match (form.parse)(&section.body) {
            Ok(snapshot) => answers.push((rank, snapshot)),
            Err(error) => failed.push((format!("nvidia-smi {}", words(section.command)), error)),
        }
    }
    // Those that tell most first: the others are filled in.
    answers.sort_by_key(|(rank, _)| *rank);
    let Some(mut snapshot) = merged(answers) else {
        let nothing = || SourceError::malformed(NAME, "none of them is understood");
        return Err(failed.into_iter().next().map_or_else(nothing, |(_, error)| error));
    };
    for (command, error) in failed {
        snapshot.warn(format!("{command}: {error}"));
    }
    Ok(snapshot)
}

fn merged(answers: Vec<(usize, Snapshot)>) -> Option<Snapshot> {
    let mut merged: Option<Snapshot> = None;
    for (rank, answer) in answers {
        let name = FORMS.get(rank).map(|form| form.name);
        match &mut merged {
            None => merged = Some(answer),
            Some(known) if known.devices.is_empty() => known.merge(answer),
            Some(known) if name == Some(list::NAME) => mig::merge_list(known, answer),
            Some(known) if name == Some(topo::NAME) => topo::join(known, &answer),
            Some(known) => known.merge(answer),
        }
    }
    merged
}

/// One run: its arguments and what it printed.
struct Section<'a> {
    command: &'a str,
    body: String,
}

fn split(text: &str) -> Vec<Section<'_>> {
    let mut sections = vec![Section { command: "before the first heading", body: String::new() }];
    let mut is_open = true;
    for line in text.lines() {
        if let Some(command) = heading(line) {
            sections.push(Section { command, body: String::new() });
            is_open = true;
            continue;
        }
        let Some(section) = sections.last_mut().filter(|_| is_open) else { continue };
        if is_other_command(line) {
            is_open = false;
        } else if is_fence(line) {
            // A fence right below a heading belongs to it; any other begins something else.
            is_open = section.body.trim().is_empty();
        } else if !line.starts_with('#') {
            section.body.push_str(line);
            section.body.push('\n');
        }
    }
    sections
}

fn form(body: &str) -> Option<(usize, &'static Form)> {
    FORMS.iter().enumerate().find(|(_, form)| (form.looks_like)(body))
}

/// The arguments of the command a heading names, where a line is one.
///
/// The help of the tool shows commands as well, indented or with words in brackets; those are none.
fn heading(line: &str) -> Option<&str> {
    if line.len() > 64 * 1024 {
        return None;
    }
    // The help of the tool shows commands indented.
    let (before, after) = line.trim_end().split_once("nvidia-smi")?;
    let line = line.trim();
    let sign = before.trim_end_matches(|c: char| !c.is_whitespace() && !is_sign(c)).trim_end();
    let is_prompt =
        sign.ends_with(is_sign) && (sign.chars().all(|c| is_sign(c) || c.is_whitespace()) || is_shell(sign));
    let after = after.strip_prefix(".exe").unwrap_or(after);
    let is_name = after.is_empty() || after.starts_with(|c: char| c.is_whitespace() || matches!(c, ':' | ']'));
    let is_decoration = |c: char| c.is_whitespace() || matches!(c, '=' | '#' | '*' | ':' | '`' | ']' | '<');
    let arguments = after.trim_matches(is_decoration);
    let is_command = is_prompt || (is_bare(before, line) && are_arguments(arguments));
    (is_command && is_name && !arguments.contains("::")).then_some(arguments)
}

/// Whether a command stands alone: `/usr/bin/nvidia-smi -q`, or in few words that end in a colon: `Output of nvidia-smi:`.
fn is_bare(before: &str, line: &str) -> bool {
    let is_path = before.is_empty() || (before.ends_with('/') && !before.contains(char::is_whitespace));
    let mut words = before.split_whitespace();
    let is_title = line.ends_with(':') && words.clone().count() <= 3;
    is_path || (is_title && words.all(|word| word.chars().all(char::is_alphabetic)))
}

/// Whether these words are what the tool is called with, and not how its help or a sentence goes on.
fn are_arguments(words: &str) -> bool {
    const COMMANDS: [&str; 7] = ["topo", "nvlink", "mig", "pmon", "dmon", "vgpu", "c2c"];
    let first = words.split_whitespace().next();
    first.is_none_or(|first| first.starts_with('-') || COMMANDS.contains(&first))
}

/// Whether a line calls another command, or waits for one: `$ dmesg`, `me@host:~$`.
fn is_other_command(line: &str) -> bool {
    let traced = line.strip_prefix("$ ").or_else(|| line.strip_prefix("+ "));
    let begins = |command: &str| command.starts_with(|c: char| c.is_ascii_lowercase() || c == '/');
    let prompt = line.trim_end().rsplit_once(['$', '#']).map(|(prompt, _)| prompt);
    traced.is_some_and(begins)
        || prompt.is_some_and(|prompt| {
            let (user, host) = prompt.split_once('@').unwrap_or_default();
            let is_word = |text: &str| !text.is_empty() && !text.contains(['|', ',', '"', '\t']);
            is_word(user) && is_word(host) && !user.contains(' ')
        })
}

fn is_sign(c: char) -> bool {
    matches!(c, '#' | '$' | '>' | '=' | '*' | '%' | '+' | '-' | '`' | '~' | '[')
}

/// Whether what stands before a command is a prompt: `root@host:~#`, `[me@host dir]$`.
fn is_shell(sign: &str) -> bool {
    sign.ends_with(['#', '$', '>', '%']) && !sign.starts_with('#') && sign.contains(['@', ':', '\\'])
}

/// Whether a line only draws a line.
fn is_fence(line: &str) -> bool {
    let line = line.trim();
    let mut chars = line.chars();
    let Some(first) = chars.next().filter(|c| matches!(c, '#' | '=' | '-' | '*' | '~' | '_')) else { return false };
    line.len() >= 8 && chars.all(|c| c == first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::Partition;
    use crate::told::Told;
    use gpupool_core::units::{Bytes, Percent};

    #[test]
    fn a_heading_is_known_in_any_decoration() {
        for (line, command) in [
            ("# $ nvidia-smi -L", "-L"),
            ("# nvidia-smi --query-gpu=\"index,name\" --format=csv", "--query-gpu=\"index,name\" --format=csv"),
            ("$ nvidia-smi", ""),
            ("=== nvidia-smi topo -m ===", "topo -m"),
            ("[root@host dir]# nvidia-smi -q", "-q"),
            ("me@host:~$ /usr/bin/nvidia-smi -q -x", "-q -x"),
            ("C:\\> nvidia-smi.exe", ""),
            ("**nvidia-smi -L**", "-L"),
            ("nvidia-smi --query-gpu=name", "--query-gpu=name"),
            ("/usr/bin/nvidia-smi --query", "--query"),
            ("Output of nvidia-smi topo -m:", "topo -m"),
            ("[nvidia-smi -L]", "-L"),
            ("==> nvidia-smi <==", ""),
        ] {
            assert_eq!(heading(line), Some(command), "{line}");
        }
        for line in [
            "    nvidia-smi [OPTION1 [ARG1]]",
            "nvidia-smi [OPTION1 [ARG1]]",
            "    nvidia-smi -q",
            "nvidia-smi should be run as root",
            "| NVIDIA-SMI 535 |",
            "        Name  : nvidia-smi",
            "# idle :: nvidia-smi (default table)",
            "# see the page of nvidia-smi for help",
        ] {
            assert_eq!(heading(line), None, "{line}");
        }
    }

    const BOX: &str = include_str!("../../tests/fixtures/nvidia_smi/sections.txt");

    #[test]
    fn what_all_runs_tell_becomes_one_and_the_first_of_each_counts() {
        assert!(looks_like(BOX));
        let snapshot = parse(BOX).unwrap();
        let [gpu, parent, first, second] = &snapshot.devices[..] else { panic!("{snapshot:#?}") };
        assert_eq!((gpu.numa, gpu.memory.used.clone()), (Some(0), Told::Value(Bytes(1 << 20))));
        assert_eq!(gpu.utilization, Told::Value(Percent(5_000)));
        assert_eq!((parent.numa, parent.mig), (Some(1), Some(true)));
        assert_eq!(parent.utilization, Told::Unsupported("N/A".into()));
        assert_eq!(first.uuid.as_deref(), Some("MIG-00000000-0000-0000-0000-000000000000"));
        assert_eq!(second.uuid.as_deref(), Some("MIG-00000001-0000-0000-0000-000000000001"));
        assert_eq!(second.memory.total, Told::Value(Bytes(9984 << 20)));
        assert_eq!(second.name.as_deref(), Some("NVIDIA H100 MIG 1g.10gb"));
        let expected = Partition::Mig {
            parent_uuid: Some("GPU-00000000-0000-0000-0000-000000000000".into()),
            gpu_instance: Some(9),
            compute_instance: Some(0),
            profile: Some("1g.10gb".into()),
        };
        assert_eq!(second.partition, Some(expected));
        assert_eq!(snapshot.links.len(), 1);
        assert_eq!(snapshot.warnings.len(), 1, "{:?}", snapshot.warnings);
        assert!(snapshot.warnings[0].starts_with("nvidia-smi nvlink -s"), "{:?}", snapshot.warnings);
    }

    #[test]
    fn the_first_run_needs_no_heading() {
        let text = "GPU 0: A10 (UUID: GPU-a)\n$ nvidia-smi --query-gpu=uuid,memory.used --format=csv\n\
                    uuid, memory.used [MiB]\nGPU-a, 5 MiB\n";
        let snapshot = parse(text).unwrap();
        let [device] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!((device.name.as_deref(), &device.memory.used), (Some("A10"), &Told::Value(Bytes(5 << 20))));
    }

    #[test]
    fn a_run_that_failed_is_the_answer_only_where_no_other_is() {
        let text = "$ nvidia-smi -q\nFailed to initialize NVML: Driver/library version mismatch\n";
        assert_eq!(parse(text).unwrap_err().code(), "driver_library_mismatch");
        assert_eq!(parse("$ nvidia-smi\nhm\n").unwrap_err().code(), "malformed");
        let none = parse("$ nvidia-smi\nNo devices were found\n");
        assert_eq!(none, Ok(Snapshot::default()));
    }
}
