//! Usage errors are reported before anything runs, with the option, the value and the allowed values.

use crate::support::run_map;

#[test]
fn usage_errors_name_the_problem_and_the_allowed_values() {
    for (arguments, expected_parts) in [
        (&["--halt", "often", "true"][..], &["--halt", "often", "now,fail=1"][..]),
        (&["-j", "0", "true"], &["--jobs", "'0'", "1..=4096"]),
        (&["--timeout", "soon", "true"], &["--timeout", "soon", "10m"]),
        (&["--speaks", "klingon", "true"], &["--speaks", "klingon", "lines", "frames"]),
        (&["--resume", "true"], &["--joblog"]),
        (&["echo {2}", ":::", "a"], &["{2}", "1 to 1"]),
        (&["echo `cat {}`", ":::", "a"], &["`…`", "$(…)"]),
        (&["echo", ":::+", "a"], &[":::+", "`:::`"]),
        (&["--speaks", "lines", ":::", "a"], &["--speaks", "COMMAND"]),
        (&["--gpu-memory-limit", "1GiB", "true"], &["--gpu-memory-limit", "--gpus 0", "--gpus 1"]),
        (&["--queue-size", "x", "true"], &["--queue-size", "'x'", "1 to 1000000"]),
    ] {
        run_map(arguments).reports(2, expected_parts);
    }
}

#[test]
fn an_unreadable_source_is_named() {
    run_map(&["echo", "::::", "/no/such/file"]).reports(1, &["/no/such/file"]);
    run_map(&["echo", "::::", "/"]).reports(1, &["/: line 1", "directory"]);
}

#[test]
fn a_nul_byte_is_reported_with_a_suggestion() {
    let reported = crate::support::with_input(crate::support::map(&["echo {}"]), b"fine\na\0b\n");
    assert_eq!(reported.out, "fine\n", "earlier arguments are processed");
    reported.reports(1, &["argument 2", "--null"]);
}
