//! Names of processes, replaced only where a format puts them: a word like `python` stands elsewhere too.

use std::collections::BTreeMap;

/// The names seen so far, each with its replacement.
#[derive(Debug, Default)]
pub(super) struct ProcessNames {
    known: BTreeMap<String, String>,
}

impl ProcessNames {
    /// The text with names replaced in XML, in nvidia-smi's table and in rocm-smi's JSON.
    pub fn replace(&mut self, text: &str) -> String {
        let xml = self.between(text, "<process_name>", |_| true, '<');
        let json = self.between(&xml, "\"PID", |between| is_pid_key(between), ',');
        if !json.contains("Process name") {
            return json;
        }
        json.split_inclusive('\n').map(|line| self.in_table(line)).collect()
    }

    /// Replaces what stands between `start` and `end`, where what follows `start` may begin with more of the key.
    fn between(&mut self, text: &str, start: &str, fits: impl Fn(&str) -> bool, end: char) -> String {
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once(start) {
            replaced.push_str(before);
            replaced.push_str(start);
            let key = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit() || "\": ".contains(c)).len();
            let key = if end == '<' { 0 } else { key };
            let (key, value) = after.split_at(key);
            replaced.push_str(key);
            let length = value.find([end, '"', '\n']).unwrap_or(value.len());
            let (name, after) = value.split_at(length);
            if fits(key) {
                replaced.push_str(&self.fake(name))
            } else {
                replaced.push_str(name)
            }
            rest = after;
        }
        replaced.push_str(rest);
        replaced
    }

    /// Replaces the name in a row of the table, keeping its columns in place.
    fn in_table(&mut self, line: &str) -> String {
        let Some((start, end)) = name_in_row(line) else { return line.to_owned() };
        let (before, rest) = line.split_at(start);
        let (name, after) = rest.split_at(end - start);
        let fake = self.fake(name);
        let (longer, shorter) = (fake.chars().count(), name.chars().count());
        let spaces = after.len() - after.trim_start_matches(' ').len();
        // One space must stay between the columns.
        let eaten = longer.saturating_sub(shorter).min(spaces.saturating_sub(1));
        format!("{before}{fake}{}{}", " ".repeat(shorter.saturating_sub(longer)), &after[eaten..])
    }

    fn fake(&mut self, name: &str) -> String {
        let bare = name.trim();
        if bare.is_empty() || bare.starts_with('[') || bare == "N/A" || bare == "-" {
            return name.to_owned();
        }
        let next = self.known.len() + 1;
        self.known.entry(bare.to_owned()).or_insert_with(|| format!("process-{next}")).clone()
    }
}

/// `104225": "` after `"PID`.
fn is_pid_key(key: &str) -> bool {
    let digits = key.trim_start_matches(|c: char| c.is_ascii_digit());
    digits.len() < key.len() && digits.ends_with('"') && digits.contains(':')
}

/// From where to where the name stands in a row: between the kind of process and the memory, which is the last column.
fn name_in_row(line: &str) -> Option<(usize, usize)> {
    const KINDS: [&str; 6] = ["C", "G", "C+G", "M", "M+C", "M+C+G"];
    let inner = line.trim_end().strip_prefix('|')?.strip_suffix('|')?;
    let mut start = None;
    let mut place = 1;
    for piece in inner.split_inclusive(' ') {
        let word = piece.trim_end();
        if start.is_none() && KINDS.contains(&word) {
            start = Some(place + piece.len());
        }
        place += piece.len();
    }
    let start = start?;
    let columns = line.get(start..1 + inner.len())?;
    let name_start = start + (columns.len() - columns.trim_start().len());
    let memory = columns.trim_end().rsplit(' ').next()?;
    let is_memory = memory.ends_with("MiB") || memory == "N/A";
    let name_end = start + columns.trim_end().strip_suffix(memory)?.trim_end().len();
    (is_memory && name_start < name_end).then_some((name_start, name_end))
}
