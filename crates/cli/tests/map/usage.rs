//! Wrong usage is told before anything is run, with the option, the value and what is allowed.

use crate::support::said;

#[test]
fn wrong_usage_names_what_is_wrong_and_what_is_allowed() {
    for (arguments, says) in [
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
        said(arguments).tells(2, says);
    }
}

#[test]
fn a_source_that_cannot_be_read_is_named() {
    said(&["echo", "::::", "/no/such/file"]).tells(1, &["/no/such/file"]);
    said(&["echo", "::::", "/"]).tells(1, &["/: line 1", "directory"]);
}

#[test]
fn a_zero_byte_is_told_with_what_may_have_been_meant() {
    let told = crate::support::with_input(crate::support::map(&["echo {}"]), b"fine\na\0b\n");
    assert_eq!(told.out, "fine\n", "what came before is done");
    told.tells(1, &["argument 2", "--null"]);
}
