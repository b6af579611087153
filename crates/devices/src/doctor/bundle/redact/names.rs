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
        let xml = self.after(text, "<process_name>", |value| Some((0, value.find('<').unwrap_or(value.len()))));
        let json = self.after(&xml, "\"PID", name_in_json);
        if !json.contains("Process name") {
            return json;
        }
        json.split_inclusive('\n').map(|line| self.in_table(line)).collect()
    }

    /// Replaces names after each `start`; `place` says from where to where one stands in what follows.
    fn after(&mut self, text: &str, start: &str, place: impl Fn(&str) -> Option<(usize, usize)>) -> String {
        let mut pieces = text.split(start);
        let mut replaced = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            replaced.push_str(start);
            let named = place(piece).and_then(|(from, to)| {
                Some(format!("{}{}{}", piece.get(..from)?, self.fake(piece.get(from..to)?), piece.get(to..)?))
            });
            replaced.push_str(named.as_deref().unwrap_or(piece));
        }
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

/// Where the name stands in `104225": "name, 1, 0, 0, 0"`: before the last four numbers of the text.
fn name_in_json(rest: &str) -> Option<(usize, usize)> {
    let after_pid = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let value = after_pid.strip_prefix('"')?.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    let text = value.split('"').next()?;
    let name = text.rsplitn(5, ',').last()?;
    let from = rest.len() - value.len();
    (after_pid.len() < rest.len()).then_some((from, from + name.len()))
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
