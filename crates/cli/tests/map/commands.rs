//! A command for each argument, as in GNU parallel.

use std::fs;

use crate::support::{map, run_map, with_input};

#[test]
fn all_combinations_run_and_are_printed_in_order() {
    let out = run_map(&["-k", "-j4", "n={2}; sleep 0.0$((4 - n)); echo {1}{2}", ":::", "a", "b", ":::", "1", "2", "3"])
        .success();
    assert_eq!(out, "a1\na2\na3\nb1\nb2\nb3\n");
}

#[test]
fn replacement_strings_are_replaced() {
    let line = "echo {} {.} {/} {//} {/.} {#} {%}";
    assert_eq!(run_map(&["-j1", line, ":::", "a/b c.txt"]).success(), "a/b c.txt a/b c b c.txt a b c 1 1\n");
    assert_eq!(
        run_map(&["-k", "echo", "{}-{}", "$HOME", ":::", "x y"]).success(),
        "x y-x y $HOME\n",
        "words need no shell"
    );
    assert_eq!(run_map(&["-k", "echo", ":::", "a", "b"]).success(), "a\nb\n", "appended where there is none");
    assert_eq!(run_map(&["-k", ":::", "echo a | tr a b", "echo c"]).success(), "b\nc\n", "an argument is a command");
}

#[test]
fn arguments_come_from_files_and_from_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lines");
    fs::write(&file, "one\ntwo words\n\nlast").unwrap();
    let path = file.to_str().unwrap();
    let expected = "[one]\n[two words]\n[]\n[last]\n";
    assert_eq!(run_map(&["-k", "echo [{}]", "::::", path]).success(), expected);
    assert_eq!(run_map(&["-k", "-a", path, "echo", "[{}]"]).success(), expected);
    assert_eq!(with_input(map(&["-k", "echo [{}]"]), &fs::read(&file).unwrap()).success(), expected);
    assert_eq!(with_input(map(&["-k", "-0", "echo [{}]"]), b"a\nb\0c").success(), "[a\nb]\n[c]\n");
    assert_eq!(run_map(&["echo"]).success(), "", "no line, no task");
}

#[test]
fn arguments_are_never_interpreted_as_commands() {
    let dir = tempfile::tempdir().unwrap();
    let evil = ["; touch x", "$(touch x)", "`touch x`", "' ; touch x ; '", "\" ; touch x ; \"", "-n", "*", "a\nb"];
    for line in ["printf '%s\\n' {}", "printf '%s\\n' \"{}\"", "printf '%s\\n' '{}'"] {
        let mut command = map(&["-k", line, ":::"]);
        command.args(evil).current_dir(dir.path());
        assert_eq!(with_input(command, b"").success(), evil.join("\n") + "\n", "{line}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "one of them was run");
}

#[test]
fn a_dry_run_prints_the_commands_and_runs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x y");
    let path = file.to_str().unwrap();
    let out = run_map(&["--dry-run", "touch {} > '{/}.log'", ":::", path]).success();
    assert_eq!(out, format!("touch '{path}' > 'x y.log'\n"));
    assert!(!file.exists());
}

#[test]
fn commands_inherit_directory_and_variables_but_no_input() {
    let mut command = map(&["-k", "cat; echo {} $NAME $GPUPOOL_SLOT; pwd", ":::", "a"]);
    command.env("NAME", "kept").current_dir("/");
    command.arg("b");
    let out = with_input(command, b"not for you").success();
    assert!(out.contains("a kept") && out.contains("b kept") && !out.contains("not for you"), "{out}");
    assert_eq!(out.matches("/\n").count(), 2, "{out}");
}

#[test]
fn a_missing_program_is_reported() {
    run_map(&["no-such-program", "x", ":::", "a"]).reports(1, &["task 1 (a)", "no-such-program", "not"]);
    run_map(&["no-such-program", ":::", "a"]).reports(1, &["task 1 (a)", "exit code 127", "no-such-program"]);
}
