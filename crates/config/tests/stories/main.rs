//! Stories about configurations: what users write, and the result.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod any_text_is_answered;
mod documentation_and_code_agree;
mod findings_say_what_to_do;
mod mistakes_are_named;
mod policies_of_the_file_are_those_of_the_pool;
mod the_examples_are_good;
mod the_strongest_source_wins;
mod what_is_in_effect_is_shown;

use gpupool_config::{
    ConfigFinding, ConfigInputs, ConfigProblems, FlagValues, HostContext, LoadedConfig, MachineFacts, load_config,
};

/// Same machine in every test.
fn machine() -> HostContext {
    HostContext { root: true, host_name: "node-a".into(), state_home: None }
}

fn from_file(text: &str) -> ConfigInputs {
    ConfigInputs { file: Some(("gpupool.toml".into(), text.into())), ..ConfigInputs::empty(machine()) }
}

fn from_env(variables: &[(&str, &str)]) -> ConfigInputs {
    let env = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    ConfigInputs { env, ..ConfigInputs::empty(machine()) }
}

fn from_flags(flags: FlagValues) -> ConfigInputs {
    ConfigInputs { flags, ..ConfigInputs::empty(machine()) }
}

fn loaded(inputs: &ConfigInputs) -> LoadedConfig {
    load_config(inputs).unwrap_or_else(|problems| panic!("{inputs:#?}\n{problems}"))
}

/// Returns the default of a setting on `machine`, as shown.
fn default_of(key: &str, machine: HostContext) -> serde_json::Value {
    let resolved = loaded(&ConfigInputs::empty(machine)).resolved;
    resolved.into_iter().find(|resolved| resolved.key == key).unwrap().value
}

/// Returns the problems of `inputs` as lines.
fn problem_lines(inputs: &ConfigInputs) -> Vec<String> {
    match load_config(inputs) {
        Err(ConfigProblems(problems)) => problems.iter().map(ToString::to_string).collect(),
        Ok(_) => panic!("nothing is wrong with {inputs:#?}"),
    }
}

/// Returns the findings without facts about this machine.
fn findings(inputs: &ConfigInputs) -> Vec<ConfigFinding> {
    gpupool_config::check_config(inputs, |_| MachineFacts::default())
}

fn finding_codes(findings: &[ConfigFinding]) -> Vec<&'static str> {
    findings.iter().map(|finding| finding.code).collect()
}
