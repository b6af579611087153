//! What somebody probably meant by a name nobody knows.

use crate::limits;
use crate::settings::{SECTIONS, all_settings};

/// Tables of the file that hold no settings but rules.
pub(crate) const RULE_TABLES: [&str; 2] = ["policy", "default_policy"];

/// What other programs call things.
const OTHER_WORDS: &[(&str, &str)] = &[
    ("address", "server.host"),
    ("bind", "server.host"),
    ("listen", "server.host"),
    ("certificate", "server.tls_cert"),
    ("cert", "server.tls_cert"),
    ("key_file", "server.tls_key"),
    ("data_dir", "server.state_dir"),
    ("level", "server.log_level"),
    ("verbosity", "server.log_level"),
    ("interval", "monitoring.refresh_interval"),
    ("gpus", "monitoring.cuda_visible_devices"),
    ("ttl", "leases.default_ttl_secs"),
    ("retention_days", "leases.history_retention_days"),
    ("url", "client.endpoint"),
    ("prefix", "api.api_prefix"),
    ("cors", "api.enable_cors"),
    ("agent", "server"),
    ("auth", "server"),
    ("logging", "server"),
    ("network", "server"),
    ("tls", "server"),
    ("http", "api"),
    ("devices", "monitoring"),
    ("gpu", "monitoring"),
    ("policies", "policy"),
];

/// The one of `known` that is nearest to `word`, if any is near.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = plain(word);
    let length = word.chars().count();
    if length == 0 || length > limits::SUGGEST_FOR {
        return None;
    }
    let near = (length / 4).clamp(1, 3);
    let ranked = known.into_iter().map(|name| (distance(&word, &plain(name)), name));
    ranked.filter(|(far, _)| *far <= near).min_by_key(|(far, _)| *far).map(|(_, name)| name)
}

/// The key that was probably meant by `name` in `section` (or outside of any).
pub(crate) fn key_for(section: Option<&str>, name: &str) -> Option<String> {
    let here = all_settings().iter().filter(|setting| Some(setting.section()) == section);
    if let Some(name) = nearest(name, here.map(|setting| setting.name())) {
        return section.map(|section| format!("{section}.{name}"));
    }
    let word = plain(name);
    let same = |setting: &&&crate::Setting| {
        plain(setting.name()) == word || setting.env.iter().any(|variable| plain(variable) == word)
    };
    if let Some(setting) = all_settings().iter().find(same) {
        return Some(setting.key.to_owned());
    }
    if let Some((_, meant)) = OTHER_WORDS.iter().find(|(other, _)| *other == word) {
        return Some((*meant).to_owned());
    }
    if section.is_none()
        && let Some(section) = nearest(name, SECTIONS.iter().map(|(name, _)| *name).chain(RULE_TABLES))
    {
        return Some(section.to_owned());
    }
    let elsewhere = nearest(name, all_settings().iter().map(|setting| setting.name()))?;
    all_settings().iter().find(|setting| setting.name() == elsewhere).map(|setting| setting.key.to_owned())
}

fn plain(word: &str) -> String {
    word.trim().trim_start_matches("--").to_lowercase().replace('-', "_")
}

/// How many letters must be added, left out, replaced or swapped with their neighbour to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before_last = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let mut cost = (last[j] + usize::from(from != to)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *from == b[j - 1] && a[i - 1] == *to {
                let swapped: &Vec<usize> = &before_last;
                cost = cost.min(swapped[j - 1] + 1);
            }
            row.push(cost);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_is_one_mistake_and_a_different_word_is_far() {
        assert_eq!(distance("prot", "port"), 1);
        assert_eq!(distance("tresholds", "threshold"), 2);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(nearest("fiffo", ["fifo", "fair-share"]), Some("fifo"));
        assert_eq!(nearest("banana", ["fifo", "fair-share"]), None);
        assert_eq!(nearest(&"x".repeat(100_000), ["fifo"]), None);
    }

    #[test]
    fn a_key_is_found_in_its_section_in_another_and_by_other_words() {
        let meant = |section, name| key_for(section, name);
        assert_eq!(meant(Some("server"), "prot").as_deref(), Some("server.port"));
        assert_eq!(meant(Some("server"), "refresh_interval").as_deref(), Some("monitoring.refresh_interval"));
        assert_eq!(meant(None, "port").as_deref(), Some("server.port"));
        assert_eq!(meant(None, "GPUPOOL_STATE_DIR").as_deref(), Some("server.state_dir"));
        assert_eq!(meant(None, "sever").as_deref(), Some("server"));
        assert_eq!(meant(None, "agent").as_deref(), Some("server"));
        assert_eq!(meant(Some("server"), "bind").as_deref(), Some("server.host"));
        assert_eq!(meant(Some("server"), "zzzzzz"), None);
    }

    #[test]
    fn other_words_lead_to_keys_and_sections_that_exist() {
        for (other, meant) in OTHER_WORDS {
            let known = all_settings().iter().any(|setting| setting.key == *meant)
                || SECTIONS.iter().any(|(section, _)| section == meant)
                || RULE_TABLES.contains(meant);
            assert!(known, "{other} leads to {meant}, which is nothing");
        }
    }
}
