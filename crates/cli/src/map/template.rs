//! A command with replacement strings, made into the command of each task.
//!
//! Several words are executed as they are, without a shell. One text is for the shell, with the arguments handed to it beside
//! the text, so that nothing in them can be taken for a command; where the text is only a program and plain words, the
//! program is executed directly, which means the same and is faster.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use bytes::Bytes;

use super::shell::{Quotes, Syntax, pieces, plain_words, quote};
use crate::output::WrongUsage;

/// The variable that tells a command the number of its worker, from 1.
pub(super) const SLOT: &str = "GPUPOOL_SLOT";
/// Numbers of sources have at most so many digits.
const LONGEST: usize = 8;

/// What is run for each task.
#[derive(Debug)]
pub(super) struct Template {
    /// What is executed.
    words: Vec<Vec<Piece>>,
    /// What a person would type into a shell for it.
    shown: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    Text(Vec<u8>),
    Argument(Replacement, Quotes),
}

impl Template {
    /// The command with so many sources of arguments.
    pub fn parse(command: &[OsString], sources: usize) -> Result<Self, WrongUsage> {
        let (words, shown) = match command {
            [] => {
                let line = Piece::Argument(Replacement::ALL, Quotes::Verbatim);
                (vec![text("sh"), text("-c"), vec![line.clone()]], vec![line])
            }
            [one] => {
                let mut pieces = pieces(one.as_bytes(), Syntax::Shell)?;
                if !pieces.iter().any(|piece| matches!(piece, Piece::Argument(..))) {
                    pieces.push(Piece::Text(b" ".to_vec()));
                    pieces.push(Piece::Argument(Replacement::ALL, Quotes::None));
                }
                (plain_words(&pieces).unwrap_or_else(|| script(&pieces, sources)), pieces)
            }
            several => {
                let pieces = |word: &OsString| pieces(word.as_bytes(), Syntax::Word);
                let mut words = several.iter().map(pieces).collect::<Result<Vec<_>, _>>()?;
                if !words.iter().flatten().any(|piece| matches!(piece, Piece::Argument(..))) {
                    words.push(vec![Piece::Argument(Replacement::ALL, Quotes::None)]);
                }
                let shown = typed(&words);
                let knows_slot =
                    shown.iter().any(|piece| matches!(piece, Piece::Argument(one, _) if one.which == Which::Slot));
                (if knows_slot { script(&shown, sources) } else { words }, shown)
            }
        };
        check_sources(&shown, sources)?;
        Ok(Self { words, shown })
    }

    /// Program and arguments of a task.
    pub fn argv(&self, arguments: &[Bytes], seq: u64) -> Vec<OsString> {
        let mut argv = Vec::with_capacity(self.words.len() + arguments.len());
        for word in &self.words {
            let mut made = Vec::new();
            for piece in word {
                match piece {
                    Piece::Text(text) => made.extend(text),
                    Piece::Argument(replacement, Quotes::Verbatim) => {
                        made.extend(replacement.values(arguments, seq).join(&b' '))
                    }
                    // Several arguments are several words: the first goes on with what stands before, and so on.
                    Piece::Argument(replacement, _) => {
                        for (nth, value) in replacement.values(arguments, seq).iter().enumerate() {
                            if nth > 0 {
                                argv.push(OsString::from_vec(std::mem::take(&mut made)));
                            }
                            made.extend(value);
                        }
                    }
                }
            }
            argv.push(OsString::from_vec(made));
        }
        argv
    }

    /// What a person would type into a shell for it.
    pub fn shown(&self, arguments: &[Bytes], seq: u64) -> Vec<u8> {
        let mut shown = Vec::new();
        for piece in &self.shown {
            match piece {
                Piece::Text(text) => shown.extend(text),
                Piece::Argument(Replacement { which: Which::Slot, .. }, _) => shown.extend(b"{%}"),
                Piece::Argument(replacement, quotes) => {
                    let values = replacement.values(arguments, seq);
                    let quoted: Vec<_> = values.iter().map(|value| quote(value, *quotes)).collect();
                    shown.extend(quoted.join(&b' '));
                }
            }
        }
        shown
    }
}

/// What is executed for a worker, whose command has no replacement strings.
pub(super) fn worker_command(command: &[OsString]) -> Vec<OsString> {
    let [one] = command else { return command.to_vec() };
    let pieces = [Piece::Text(one.as_bytes().to_vec())];
    match plain_words(&pieces) {
        Some(words) => Template { words, shown: Vec::new() }.argv(&[], 0),
        None => ["sh", "-c"].map(OsString::from).into_iter().chain([one.clone()]).collect(),
    }
}

fn text(text: &str) -> Vec<Piece> {
    vec![Piece::Text(text.into())]
}

fn check_sources(pieces: &[Piece], sources: usize) -> Result<(), WrongUsage> {
    for piece in pieces {
        if let Piece::Argument(Replacement { which: Which::Source(nth), .. }, _) = piece
            && *nth >= sources
        {
            let number = nth + 1;
            return Err(WrongUsage::of(format!(
                "COMMAND: {{{number}}} means source {number} of arguments; allowed are 1 to {sources} here"
            )));
        }
    }
    Ok(())
}

/// A text as a script for `sh`, which finds its arguments in variables: nothing in them is ever read as a command.
fn script(pieces: &[Piece], sources: usize) -> Vec<Vec<Piece>> {
    let mut parameters: Vec<Replacement> = Vec::new();
    let mut body = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => body.extend(text),
            Piece::Argument(replacement, quotes) => {
                let each = each(*replacement, sources).into_iter();
                let named: Vec<String> = each.map(|one| refer(&variable(one, &mut parameters), *quotes)).collect();
                body.extend(named.join(" ").into_bytes());
            }
        }
    }
    let mut script = named(parameters.len()).into_bytes();
    script.extend(body);
    let mut words = vec![text("sh"), text("-c"), vec![Piece::Text(script)], text("sh")];
    words.extend(parameters.into_iter().map(|one| vec![Piece::Argument(one, Quotes::None)]));
    words
}

/// Words as a person would type them.
fn typed(words: &[Vec<Piece>]) -> Vec<Piece> {
    let mut shown = Vec::new();
    for (nth, word) in words.iter().enumerate() {
        if nth > 0 {
            shown.push(Piece::Text(b" ".to_vec()));
        }
        if word.is_empty() {
            shown.push(Piece::Text(b"''".to_vec()));
        }
        shown.extend(word.iter().map(|piece| match piece {
            Piece::Text(text) => Piece::Text(quote(text, Quotes::None)),
            argument => argument.clone(),
        }));
    }
    shown
}

/// One for each argument it means.
fn each(replacement: Replacement, sources: usize) -> Vec<Replacement> {
    match replacement.which {
        Which::All => (0..sources).map(|nth| Replacement { which: Which::Source(nth), ..replacement }).collect(),
        _ => vec![replacement],
    }
}

fn variable(one: Replacement, parameters: &mut Vec<Replacement>) -> String {
    if one.which == Which::Slot {
        return SLOT.into();
    }
    let known = parameters.iter().position(|parameter| *parameter == one);
    let nth = known.unwrap_or_else(|| {
        parameters.push(one);
        parameters.len() - 1
    });
    format!("gpupool_{}", nth + 1)
}

fn refer(variable: &str, quotes: Quotes) -> String {
    match quotes {
        Quotes::None | Quotes::Verbatim => format!("\"${variable}\""),
        Quotes::Double => format!("${{{variable}}}"),
        Quotes::Single => format!("'\"${variable}\"'"),
    }
}

/// Gives the parameters names of their own: `$1` is another one within a function.
fn named(parameters: usize) -> String {
    if parameters == 0 {
        return String::new();
    }
    let names: String = (1..=parameters).map(|nth| format!("gpupool_{nth}=${{{nth}}} ")).collect();
    format!("{}; shift {parameters}; ", names.trim_end())
}

/// A replacement string, such as `{}`, `{2/.}` or `{#}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replacement {
    pub which: Which,
    pub part: Part,
}

/// What stands in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The arguments of all sources.
    All,
    /// The argument of one source, from 0.
    Source(usize),
    /// The task's number, from 1.
    Sequence,
    /// The worker's number, from 1, known when it runs.
    Slot,
}

/// What of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it: `{}`.
    Whole,
    /// Without its extension: `{.}`.
    Stem,
    /// Without its directory: `{/}`.
    Name,
    /// Its directory: `{//}`.
    Directory,
    /// Without directory and extension: `{/.}`.
    NameStem,
}

impl Replacement {
    pub const ALL: Self = Self { which: Which::All, part: Part::Whole };

    /// The replacement string a text begins with, and its length.
    pub fn at(text: &[u8]) -> Option<(Self, usize)> {
        let end = text.iter().take(LONGEST).position(|byte| *byte == b'}')?;
        let inside = text[..end].strip_prefix(b"{")?;
        Self::parse(inside).map(|replacement| (replacement, end + 1))
    }

    fn parse(inside: &[u8]) -> Option<Self> {
        let whole = |which| Some(Self { which, part: Part::Whole });
        match inside {
            b"#" => return whole(Which::Sequence),
            b"%" => return whole(Which::Slot),
            _ => {}
        }
        let digits = inside.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let which = match std::str::from_utf8(&inside[..digits]).ok()? {
            "" => Which::All,
            number => Which::Source(number.parse::<usize>().ok()?.checked_sub(1)?),
        };
        let part = match &inside[digits..] {
            b"" => Part::Whole,
            b"." => Part::Stem,
            b"/" => Part::Name,
            b"//" => Part::Directory,
            b"/." => Part::NameStem,
            _ => return None,
        };
        Some(Self { which, part })
    }

    /// What stands in its place, one for each argument it means; the slot is not known here.
    fn values(self, arguments: &[Bytes], seq: u64) -> Vec<Bytes> {
        match self.which {
            Which::All => arguments.iter().map(|argument| self.part.of(argument)).collect(),
            Which::Source(nth) => arguments.get(nth).map(|argument| self.part.of(argument)).into_iter().collect(),
            Which::Sequence => vec![Bytes::from(seq.to_string())],
            Which::Slot => Vec::new(),
        }
    }
}

impl Part {
    fn of(self, argument: &Bytes) -> Bytes {
        let name_at = argument.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        // Without a dot, or with nothing behind it, there is no extension.
        let dot = argument[name_at..].iter().rposition(|byte| *byte == b'.').map(|dot| name_at + dot);
        let stem_end = dot.filter(|dot| dot + 1 < argument.len()).unwrap_or(argument.len());
        match self {
            Self::Whole => argument.clone(),
            Self::Stem => argument.slice(..stem_end),
            Self::Name => argument.slice(name_at..),
            Self::NameStem => argument.slice(name_at..stem_end),
            Self::Directory => directory(argument, name_at),
        }
    }
}

fn directory(argument: &Bytes, name_at: usize) -> Bytes {
    let length = argument[..name_at].iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    match (name_at, length) {
        (0, _) => Bytes::from_static(b"."),
        (_, 0) => Bytes::from_static(b"/"),
        (_, length) => argument.slice(..length),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn value(of: &str, argument: &'static str) -> String {
        let (replacement, length) = Replacement::at(of.as_bytes()).unwrap_or_else(|| panic!("{of} is known"));
        assert_eq!(length, of.len());
        let values = replacement.values(&[Bytes::from_static(b"first"), Bytes::from_static(argument.as_bytes())], 3);
        String::from_utf8(values[0].to_vec()).unwrap()
    }

    #[test]
    fn parts_of_paths_are_those_people_expect() {
        for (argument, stem, name, directory, name_stem) in [
            ("a/b.tar.gz", "a/b.tar", "b.tar.gz", "a", "b.tar"),
            ("b", "b", "b", ".", "b"),
            ("/b.x", "/b", "b.x", "/", "b"),
            ("a.b/c", "a.b/c", "c", "a.b", "c"),
            ("a//b.", "a//b.", "b.", "a", "b."),
            ("a/", "a/", "", "a", ""),
            ("", "", "", ".", ""),
        ] {
            let parts = ["{2.}", "{2/}", "{2//}", "{2/.}"].map(|of| value(of, argument));
            assert_eq!(parts, [stem, name, directory, name_stem], "{argument:?}");
        }
        assert_eq!((value("{#}", ""), value("{1}", ""), value("{}", "")), ("3".into(), "first".into(), "first".into()));
    }

    #[test]
    fn what_is_no_replacement_string_stays() {
        for text in ["{print}", "{", "{}x}"[3..].into(), "{0}", "{1/./}", "{-1}", "{99999999999}", "{ }", "x{}"] {
            assert_eq!(Replacement::at(text.as_bytes()), None, "{text}");
        }
    }

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
        for text in [
            "true | cat",
            "X=1 true",
            "true;",
            "echo {}",
            "no-such-program {}",
            "{} x",
            "true ~",
            "true {%}",
            "true '{}'",
        ] {
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
        assert_eq!(
            shown(&["cat {} \"{/}\" '{}' | wc"], &["it's $1"]),
            r#"cat 'it'\''s $1' "it's \$1" 'it'\''s $1' | wc"#
        );
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
}
