//! Any file and environment results in a configuration or a list of problems.

use gpupool_config::{SECTIONS, all_settings, limits, load_config};
use proptest::prelude::*;

use super::{findings, from_env, from_file};

/// Value in TOML syntax, allowed or not.
fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}").replace("NaN", "nan")),
        any::<bool>().prop_map(|flag| flag.to_string()),
        any::<String>().prop_map(|text| format!("{text:?}")),
        "\"[0-9]{1,3}(ms|s|m|h|d|GiB|MiB|%)\"",
        Just("[]".to_owned()),
        Just("[\"a\", \"b\"]".to_owned()),
        Just("[[1], {x = 2}]".to_owned()),
        Just("{ a = \"b\", c = 1 }".to_owned()),
        Just("0o7777777777777777777777".to_owned()),
        Just("0xffffffffffffffffffffffff".to_owned()),
        Just("1979-05-27".to_owned()),
    ]
}

/// Line with a known key, a key of a policy, or nonsense.
fn line() -> impl Strategy<Value = String> {
    let names: Vec<&str> = all_settings().iter().map(|setting| setting.name()).collect();
    let rules =
        ["name", "owners", "sizes", "labels", "min_fraction", "max_memory", "gpus", "weight", "owners.ann.gpus"];
    let key = prop_oneof![prop::sample::select(names), prop::sample::select(rules.to_vec())];
    let header = prop::sample::select(SECTIONS).prop_map(|(name, _)| format!("[{name}]"));
    let rule_header =
        prop::sample::select(&["[[policy]]", "[default_policy]", "[quota.owners.bob]", "[quota.default]"][..]);
    prop_oneof![
        4 => (key, value()).prop_map(|(key, value)| format!("{key} = {value}")),
        2 => header,
        1 => rule_header.prop_map(str::to_owned),
        1 => any::<String>(),
    ]
}

fn check_any_text(text: &str) {
    let inputs = from_file(text);
    if let Err(problems) = load_config(&inputs) {
        assert!((1..=limits::PROBLEMS).contains(&problems.0.len()), "{} problems in {text:?}", problems.0.len());
    }
    findings(&inputs);
}

proptest! {
    #[test]
    fn any_file_is_accepted_or_refused(text in any::<String>()) {
        check_any_text(&text);
    }

    #[test]
    fn any_file_of_likely_lines_is_accepted_or_refused(lines in prop::collection::vec(line(), 0..8)) {
        check_any_text(&lines.join("\n"));
    }

    #[test]
    fn any_value_of_any_variable_is_accepted_or_refused(index in 0..all_settings().len(), value in any::<String>()) {
        let setting = &all_settings()[index];
        for name in setting.env {
            let inputs = from_env(&[(name, &value)]);
            if let Err(problems) = load_config(&inputs) {
                let printed = problems.to_string();
                prop_assert!(printed.contains(name), "{printed} does not name {name}");
                // A shorter value may appear in the message by chance.
                let tells = value.trim().len() >= 4 && printed.contains(value.trim());
                prop_assert!(!setting.secret || !tells, "{printed} contains the secret");
            }
            findings(&inputs);
        }
    }
}

#[test]
fn a_deeply_nested_or_huge_file_is_refused() {
    check_any_text(&format!("x = {}", "[".repeat(100_000)));
    check_any_text(&"a.".repeat(100_000));
    check_any_text(&format!("[{}x]", "a.".repeat(50_000)));
    check_any_text(&"[[policy]]\n".repeat(limits::POLICIES + 1));
    check_any_text(&"# comment\n".repeat(200_000));
    check_any_text(&(0..5_000).map(|n| format!("key{n} = 1\n")).collect::<String>());
}
