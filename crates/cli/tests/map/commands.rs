//! A command for each argument, as GNU parallel has it.

use std::fs;

use crate::support::{map, said, with_input};

#[test]
fn every_combination_is_run_and_comes_out_in_order() {
    let out =
        said(&["-k", "-j4", "n={2}; sleep 0.0$((4 - n)); echo {1}{2}", ":::", "a", "b", ":::", "1", "2", "3"]).fine();
    assert_eq!(out, "a1\na2\na3\nb1\nb2\nb3\n");
}

#[test]
fn replacement_strings_are_replaced() {
    let line = "echo {} {.} {/} {//} {/.} {#} {%}";
    assert_eq!(said(&["-j1", line, ":::", "a/b c.txt"]).fine(), "a/b c.txt a/b c b c.txt a b c 1 1\n");
    assert_eq!(said(&["-k", "echo", "{}-{}", "$HOME", ":::", "x y"]).fine(), "x y-x y $HOME\n", "words need no shell");
    assert_eq!(said(&["-k", "echo", ":::", "a", "b"]).fine(), "a\nb\n", "appended where there is none");
    assert_eq!(said(&["-k", ":::", "echo a | tr a b", "echo c"]).fine(), "b\nc\n", "an argument is a command");
}

#[test]
fn arguments_come_from_files_and_from_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lines");
    fs::write(&file, "one\ntwo words\n\nlast").unwrap();
    let path = file.to_str().unwrap();
    let expected = "[one]\n[two words]\n[]\n[last]\n";
    assert_eq!(said(&["-k", "echo [{}]", "::::", path]).fine(), expected);
    assert_eq!(said(&["-k", "-a", path, "echo", "[{}]"]).fine(), expected);
    assert_eq!(with_input(map(&["-k", "echo [{}]"]), &fs::read(&file).unwrap()).fine(), expected);
    assert_eq!(with_input(map(&["-k", "-0", "echo [{}]"]), b"a\nb\0c").fine(), "[a\nb]\n[c]\n");
    assert_eq!(said(&["echo"]).fine(), "", "no line, no task");
}

#[test]
fn no_argument_is_ever_taken_for_a_command() {
    let dir = tempfile::tempdir().unwrap();
    let evil = ["; touch x", "$(touch x)", "`touch x`", "' ; touch x ; '", "\" ; touch x ; \"", "-n", "*", "a\nb"];
    for line in ["printf '%s\\n' {}", "printf '%s\\n' \"{}\"", "printf '%s\\n' '{}'"] {
        let mut command = map(&["-k", line, ":::"]);
        command.args(evil).current_dir(dir.path());
        assert_eq!(with_input(command, b"").fine(), evil.join("\n") + "\n", "{line}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "one of them was run");
}

#[test]
fn a_dry_run_shows_what_could_be_typed_and_runs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x y");
    let path = file.to_str().unwrap();
    let out = said(&["--dry-run", "touch {} > '{/}.log'", ":::", path]).fine();
    assert_eq!(out, format!("touch '{path}' > 'x y.log'\n"));
    assert!(!file.exists());
}

#[test]
fn commands_have_no_input_and_their_own_directory_and_variables() {
    let mut command = map(&["-k", "cat; echo {} $NAME $GPUPOOL_SLOT; pwd", ":::", "a"]);
    command.env("NAME", "kept").current_dir("/");
    command.arg("b");
    let out = with_input(command, b"not for you").fine();
    assert!(out.contains("a kept") && out.contains("b kept") && !out.contains("not for you"), "{out}");
    assert_eq!(out.matches("/\n").count(), 2, "{out}");
}

#[test]
fn a_program_that_is_not_there_is_told() {
    said(&["no-such-program", "x", ":::", "a"]).tells(1, &["task 1 (a)", "no-such-program", "not"]);
    said(&["no-such-program", ":::", "a"]).tells(1, &["task 1 (a)", "exit code 127", "no-such-program"]);
}
