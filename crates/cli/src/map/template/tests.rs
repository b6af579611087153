use std::process::Command;

use proptest::prelude::*;

use super::*;

fn template(command: &[&str], sources: usize) -> Template {
    let command: Vec<OsString> = command.iter().map(OsString::from).collect();
    Template::parse(&command, sources).unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn arguments(arguments: &[&'static str]) -> Vec<Bytes> {
    arguments.iter().map(|argument| Bytes::from_static(argument.as_bytes())).collect()
}

fn shown(command: &[&str], given: &[&'static str]) -> String {
    String::from_utf8(template(command, given.len()).shown(&arguments(given), 7)).unwrap()
}

fn argv(command: &[&str], given: &[&'static str]) -> Vec<String> {
    let argv = template(command, given.len()).argv(&arguments(given), 7);
    argv.into_iter().map(|word| word.into_string().unwrap()).collect()
}

/// What a program writes.
fn output(argv: &[OsString]) -> Vec<u8> {
    let output = Command::new(&argv[0]).args(&argv[1..]).env("GPUPOOL_SLOT", "3").output().unwrap();
    assert!(output.status.success(), "{argv:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn several_words_are_executed_as_they_are() {
    assert_eq!(argv(&["cp", "--", "{}", "out/{/.} $x"], &["a b.c"]), ["cp", "--", "a b.c", "out/a b $x"]);
    assert_eq!(argv(&["echo", "x"], &["a", "b c"]), ["echo", "x", "a", "b c"], "none: they are appended");
    assert_eq!(argv(&["echo", "{2}-{1}", "{#}"], &["a", "b"]), ["echo", "b-a", "7"]);
    assert_eq!(argv(&["echo", "x{}y"], &["a", "b"]), ["echo", "xa", "by"], "as a shell would take it");
    assert_eq!(shown(&["cp", "", "{}", "out/{/.} $x"], &["a b.c"]), "cp '' 'a b.c' out/'a b'' $x'");
}

#[test]
fn a_text_of_plain_words_needs_no_shell() {
    assert_eq!(argv(&["true  --in={} -x {#}"], &["a b"]), ["true", "--in=a b", "-x", "7"]);
    assert_eq!(argv(&["true"], &["a", "b"]), ["true", "a", "b"]);
    for text in
        ["true | cat", "X=1 true", "true;", "echo {}", "no-such-program {}", "{} x", "true ~", "true {%}", "true '{}'"]
    {
        assert_eq!(argv(&[text], &["a"])[..2], ["sh", "-c"], "{text}");
    }
}

#[test]
fn without_a_command_the_argument_is_one() {
    let argv = template(&[], 1).argv(&arguments(&["printf %s x | tr x y"]), 1);
    assert_eq!(output(&argv), b"y");
    assert_eq!(shown(&[], &["a | b"]), "a | b");
}

#[test]
fn what_is_shown_can_be_typed() {
    assert_eq!(shown(&["cat {} \"{/}\" '{}' | wc"], &["it's $1"]), r#"cat 'it'\''s $1' "it's \$1" 'it'\''s $1' | wc"#);
    assert_eq!(shown(&["true {%}"], &["a"]), "true {%}");
}

#[test]
fn the_slot_is_known_when_it_runs() {
    for command in [&["printf '%s' {%}{}"][..], &["printf", "%s", "{%}{}"]] {
        assert_eq!(output(&template(command, 1).argv(&arguments(&["a b"]), 1)), b"3a b", "{command:?}");
    }
}

#[test]
fn where_an_argument_cannot_stand_is_told_with_what_to_do() {
    let refused = |text: &str, sources| Template::parse(&[text.into()], sources).unwrap_err().to_string();
    assert!(refused("echo `cat {}`", 1).contains("$(…)"));
    assert!(refused("echo $(({}+1))", 1).contains("x={}"));
    assert!(refused("echo {3}", 2).contains("1 to 2"));
}

/// Texts in which the argument stands in every kind of quotes; each writes the argument, and nothing else.
const PLACES: [&str; 9] = [
    "printf %s {}",
    "printf %s \"{}\"",
    "printf %s '{}'",
    "printf %s \"$(printf %sx {})\" | sed '$s/x$//'",
    "printf %s \"$(printf '%sx' \"{}\")\" | sed '$s/x$//'",
    "f() { printf %s {}; }; f other",
    "(printf %s \"it's\" >/dev/null; printf %s {})",
    "x={}; printf %s \"$x\"",
    "printf %s \\\\ >/dev/null; printf %s '''{}'''",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_real_shell_takes_every_argument_as_it_is(argument in "[ -~\\n\\t$'\"`\\\\*]{0,12}", place in 0..PLACES.len()) {
        let template = template(&[PLACES[place]], 1);
        let given = [Bytes::from(argument.clone().into_bytes())];
        let expected = if PLACES[place].contains("sed") && argument.is_empty() { Vec::new() } else { argument.clone().into_bytes() };
        prop_assert_eq!(output(&template.argv(&given, 1)), expected.clone(), "run: {}", PLACES[place]);
        let typed = OsString::from_vec(template.shown(&given, 1));
        let by_hand = output(&["sh".into(), "-c".into(), typed.clone()]);
        prop_assert_eq!(by_hand, expected, "typed: {:?}", typed);
    }

    #[test]
    fn any_command_is_a_template_or_an_error_and_never_a_panic(
        command in prop::collection::vec("[a{}#%/.0-9 '\"`$()\\\\]{0,12}", 0..4), given in prop::collection::vec(any::<Vec<u8>>(), 1..3)
    ) {
        let command: Vec<OsString> = command.into_iter().map(OsString::from).collect();
        let given: Vec<Bytes> = given.into_iter().map(Bytes::from).collect();
        if let Ok(template) = Template::parse(&command, given.len()) {
            template.argv(&given, 1);
            template.shown(&given, 1);
        }
    }
}
