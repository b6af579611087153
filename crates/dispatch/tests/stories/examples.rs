//! Example programs, run from the outside.

use std::process::Command;

use crate::support::example;

fn run(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(example(name)).args(arguments).output().unwrap();
    assert!(output.status.success(), "{name}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_example_counts_primes() {
    let output = run("dispatch", &[]);
    assert!(output.starts_with("148933 primes below 2000000; 200 tasks done, 0 failed"), "{output}");
}

/// Ten million tasks with a release build in `benches/run-dispatch`.
#[test]
fn a_long_source_takes_little_memory() {
    let mebibytes: f64 = run("dispatch_cost", &["memory", "500000"]).trim().parse().unwrap();
    assert!(mebibytes < 64.0, "{mebibytes} MiB");
}
