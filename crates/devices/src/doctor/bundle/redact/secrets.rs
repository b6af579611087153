//! Values that are replaced wherever they stand: serial numbers, ids of devices, the name of the host.

use std::collections::BTreeMap;

/// What is to be replaced, and by what.
#[derive(Debug, Default)]
pub(super) struct Secrets {
    replacements: BTreeMap<String, String>,
    serials: usize,
    uuids: usize,
    ids: u64,
    host: Option<String>,
}

impl Secrets {
    /// Learns the values of all keys that speak of a serial number.
    pub fn learn_serials(&mut self, text: &str) {
        for (key_start, value) in values_of(text, "serial") {
            // What AMD's tools call the serial number of the chip is its unique id.
            let before = text.get(..key_start).unwrap_or_default();
            let is_id = before.len() >= 5 && before.as_bytes()[before.len() - 5..].eq_ignore_ascii_case(b"asic_");
            let is_serial = value.len() >= 4 && value.bytes().any(|byte| byte.is_ascii_digit());
            if is_id || !is_serial || self.replacements.contains_key(value) {
                continue;
            }
            self.serials += 1;
            self.replacements.insert(value.to_owned(), format!("serial-{}", self.serials));
        }
    }

    /// Learns UUIDs by their form, and AMD's unique ids by their keys.
    pub fn learn_uuids(&mut self, file: &str, text: &str) {
        for start in 0..text.len() {
            let Some(uuid) = uuid_at(text, start) else { continue };
            if self.replacements.contains_key(uuid) {
                continue;
            }
            // Another spelling of a known one is the same device.
            let lower = uuid.to_ascii_lowercase();
            let known = self.replacements.get(&lower).cloned();
            let fake = known.unwrap_or_else(|| {
                self.uuids += 1;
                format!("00000000-0000-4000-8000-{:012}", self.uuids)
            });
            self.replacements.insert(lower, fake.clone());
            self.replacements.insert(uuid.to_owned(), fake);
        }
        if file.ends_with("/unique_id") {
            self.learn_id(u64::from_str_radix(text.trim(), 16).ok());
        }
        for key in ["unique_id", "unique id", "asic_serial"] {
            for (_, value) in values_of(text, key) {
                self.learn_id(match value.strip_prefix("0x") {
                    Some(digits) => u64::from_str_radix(digits, 16).ok(),
                    None if file.contains("/topology/") => value.parse().ok(),
                    None => None,
                });
            }
        }
    }

    /// Learns the name of the host, unless it is too short or common to be told from other words.
    pub fn learn_host(&mut self, host: &str) {
        if host.len() >= 4 && host != "localhost" {
            self.host = Some(host.to_owned());
        }
    }

    /// The text with every secret replaced where it stands alone.
    pub fn replace(&self, text: &str) -> String {
        let is_word = |c: char| c.is_alphanumeric();
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_');
        let mut text = text.to_owned();
        for (secret, fake) in &self.replacements {
            text = replace_alone(text, secret, fake, is_word);
        }
        match &self.host {
            Some(host) => replace_alone(text, host, "host", is_name),
            None => text,
        }
    }

    /// Learns a number in each way it is written.
    fn learn_id(&mut self, id: Option<u64>) {
        // Small numbers are no identities and stand everywhere.
        let Some(id) = id.filter(|id| *id > u64::from(u32::MAX)) else { return };
        if self.replacements.contains_key(&id.to_string()) {
            return;
        }
        self.ids += 1;
        let fake = 0xfa00_0000_0000_0000 | self.ids;
        self.replacements.insert(id.to_string(), fake.to_string());
        for hex in [format!("{id:x}"), format!("{id:016x}"), format!("{id:X}"), format!("{id:016X}")] {
            self.replacements.insert(format!("0x{hex}"), format!("0x{fake:x}"));
            self.replacements.insert(hex, format!("{fake:x}"));
        }
    }
}

/// Without the user and the host that built a kernel or module: `(ada@build)`.
pub(super) fn without_builder(text: &str) -> String {
    let is_builder = |word: &str| word.starts_with('(') && word.contains('@');
    let piece = |piece: &str| {
        let word = piece.trim_end();
        if is_builder(word) { piece.replace(word, "(builder@host)") } else { piece.to_owned() }
    };
    text.split_inclusive(char::is_whitespace).map(piece).collect()
}

/// Where each key that contains `key` starts, and its value, in XML, JSON, and `key: value` lines.
fn values_of<'a>(text: &'a str, key: &str) -> Vec<(usize, &'a str)> {
    let lower = text.to_ascii_lowercase();
    let value = |(start, _): (usize, &str)| {
        let rest = text.get(start + key.len()..)?;
        let after_key = rest.trim_start_matches(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | ' '));
        let after_separator = after_key.trim_start_matches(['"', ':', '>', '=', ' ', '\t']);
        // The kernel's topology has only a space between the two.
        let separated = after_separator.len() < after_key.len() || rest.starts_with(' ');
        let is_value = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let end = after_separator.find(|c| !is_value(c)).unwrap_or(after_separator.len());
        let value = after_separator.get(..end).filter(|value| separated && !value.is_empty())?;
        Some((start, value))
    };
    lower.match_indices(key).filter_map(value).collect()
}

/// The UUID that starts here and stands alone.
fn uuid_at(text: &str, start: usize) -> Option<&str> {
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let candidate = text.get(start..start + 36)?;
    let groups = candidate.split('-');
    let fits = groups.clone().count() == GROUPS.len()
        && groups
            .zip(GROUPS)
            .all(|(group, length)| group.len() == length && group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let alone = |neighbour: Option<&u8>| !neighbour.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let before = start.checked_sub(1).and_then(|place| bytes.get(place));
    (fits && alone(before) && alone(bytes.get(start + 36))).then_some(candidate)
}

/// Replaces `secret` where no character of a word is next to it.
fn replace_alone(text: String, secret: &str, fake: &str, is_word: impl Fn(char) -> bool) -> String {
    if !text.contains(secret) {
        return text;
    }
    let mut replaced = String::with_capacity(text.len());
    let mut done = 0;
    for (start, found) in text.match_indices(secret) {
        let end = start + found.len();
        let before = text[..start].chars().next_back();
        let after = text[end..].chars().next();
        replaced.push_str(&text[done..start]);
        let alone = !before.is_some_and(&is_word) && !after.is_some_and(&is_word);
        replaced.push_str(if alone { fake } else { found });
        done = end;
    }
    replaced.push_str(&text[done..]);
    replaced
}
