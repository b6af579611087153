//! Command templates with replacement strings.
//!
//! Several words are executed directly, without a shell. A single text is shell code; the arguments are passed in
//! variables, so they are never interpreted as commands. If the text is only a program and plain words, it is executed
//! directly, which has the same meaning and is faster.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use bytes::Bytes;

use super::shell::{QuoteContext, TextSyntax, parse_pieces, plain_words, quote_argument};
use crate::output::UsageError;

/// Variable with the worker's number, from 1.
pub(super) const SLOT_VARIABLE: &str = "GPUPOOL_SLOT";
/// Maximum length of a replacement string.
const MAX_REPLACEMENT_BYTES: usize = 8;

/// Template of a task's command.
#[derive(Debug)]
pub(super) struct CommandTemplate {
    /// Words to execute.
    words: Vec<Vec<TemplatePiece>>,
    /// Command as a user would type it into a shell.
    shown: Vec<TemplatePiece>,
}

/// Literal text or a replacement string with its quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TemplatePiece {
    Text(Vec<u8>),
    Argument(ReplacementString, QuoteContext),
}

impl CommandTemplate {
    /// Parses a command for a number of argument sources.
    pub fn parse(command: &[OsString], sources: usize) -> Result<Self, UsageError> {
        let (words, shown) = match command {
            [] => {
                let line = TemplatePiece::Argument(ReplacementString::ALL, QuoteContext::Verbatim);
                (vec![literal("sh"), literal("-c"), vec![line.clone()]], vec![line])
            }
            [one] => {
                let mut pieces = parse_pieces(one.as_bytes(), TextSyntax::Shell)?;
                if !pieces.iter().any(|piece| matches!(piece, TemplatePiece::Argument(..))) {
                    pieces.push(TemplatePiece::Text(b" ".to_vec()));
                    pieces.push(TemplatePiece::Argument(ReplacementString::ALL, QuoteContext::None));
                }
                (plain_words(&pieces).unwrap_or_else(|| script(&pieces, sources)), pieces)
            }
            several => {
                let pieces = |word: &OsString| parse_pieces(word.as_bytes(), TextSyntax::Word);
                let mut words = several.iter().map(pieces).collect::<Result<Vec<_>, _>>()?;
                if !words.iter().flatten().any(|piece| matches!(piece, TemplatePiece::Argument(..))) {
                    words.push(vec![TemplatePiece::Argument(ReplacementString::ALL, QuoteContext::None)]);
                }
                let shown = join_words(&words);
                let uses_slot = shown.iter().any(
                    |piece| matches!(piece, TemplatePiece::Argument(one, _) if one.value == ReplacementValue::Slot),
                );
                (if uses_slot { script(&shown, sources) } else { words }, shown)
            }
        };
        check_source_numbers(&shown, sources)?;
        Ok(Self { words, shown })
    }

    /// Returns program and arguments for a task.
    pub fn argv(&self, arguments: &[Bytes], seq: u64) -> Vec<OsString> {
        let mut argv = Vec::with_capacity(self.words.len() + arguments.len());
        for word in &self.words {
            let mut word_bytes = Vec::new();
            for piece in word {
                match piece {
                    TemplatePiece::Text(text) => word_bytes.extend(text),
                    TemplatePiece::Argument(replacement, QuoteContext::Verbatim) => {
                        word_bytes.extend(replacement.values(arguments, seq).join(&b' '))
                    }
                    // Several arguments become several words, as in a shell: the first one continues the current word.
                    TemplatePiece::Argument(replacement, _) => {
                        for (nth, value) in replacement.values(arguments, seq).iter().enumerate() {
                            if nth > 0 {
                                argv.push(OsString::from_vec(std::mem::take(&mut word_bytes)));
                            }
                            word_bytes.extend(value);
                        }
                    }
                }
            }
            argv.push(OsString::from_vec(word_bytes));
        }
        argv
    }

    /// Returns the command as a user would type it into a shell.
    pub fn shown(&self, arguments: &[Bytes], seq: u64) -> Vec<u8> {
        let mut shown = Vec::new();
        for piece in &self.shown {
            match piece {
                TemplatePiece::Text(text) => shown.extend(text),
                TemplatePiece::Argument(ReplacementString { value: ReplacementValue::Slot, .. }, _) => {
                    shown.extend(b"{%}")
                }
                TemplatePiece::Argument(replacement, quotes) => {
                    let values = replacement.values(arguments, seq);
                    let quoted: Vec<_> = values.iter().map(|value| quote_argument(value, *quotes)).collect();
                    shown.extend(quoted.join(&b' '));
                }
            }
        }
        shown
    }
}

/// Returns the words to execute for a worker, whose command has no replacement strings.
pub(super) fn worker_command(command: &[OsString]) -> Vec<OsString> {
    let [one] = command else { return command.to_vec() };
    let pieces = [TemplatePiece::Text(one.as_bytes().to_vec())];
    match plain_words(&pieces) {
        Some(words) => CommandTemplate { words, shown: Vec::new() }.argv(&[], 0),
        None => ["sh", "-c"].map(OsString::from).into_iter().chain([one.clone()]).collect(),
    }
}

fn literal(text: &str) -> Vec<TemplatePiece> {
    vec![TemplatePiece::Text(text.into())]
}

fn check_source_numbers(pieces: &[TemplatePiece], sources: usize) -> Result<(), UsageError> {
    for piece in pieces {
        if let TemplatePiece::Argument(ReplacementString { value: ReplacementValue::Source(nth), .. }, _) = piece
            && *nth >= sources
        {
            let number = nth + 1;
            return Err(UsageError::new(format!(
                "COMMAND: {{{number}}} refers to source {number} of arguments; allowed: 1 to {sources}"
            )));
        }
    }
    Ok(())
}

/// Builds a script for `sh` that receives its arguments in variables, so they are never interpreted as commands.
fn script(pieces: &[TemplatePiece], sources: usize) -> Vec<Vec<TemplatePiece>> {
    let mut parameters: Vec<ReplacementString> = Vec::new();
    let mut body = Vec::new();
    for piece in pieces {
        match piece {
            TemplatePiece::Text(text) => body.extend(text),
            TemplatePiece::Argument(replacement, quotes) => {
                let each = expand_sources(*replacement, sources).into_iter();
                let named: Vec<String> =
                    each.map(|one| reference(&variable_for(one, &mut parameters), *quotes)).collect();
                body.extend(named.join(" ").into_bytes());
            }
        }
    }
    let mut script = name_parameters(parameters.len()).into_bytes();
    script.extend(body);
    let mut words = vec![literal("sh"), literal("-c"), vec![TemplatePiece::Text(script)], literal("sh")];
    words.extend(parameters.into_iter().map(|one| vec![TemplatePiece::Argument(one, QuoteContext::None)]));
    words
}

/// Joins words as a user would type them.
fn join_words(words: &[Vec<TemplatePiece>]) -> Vec<TemplatePiece> {
    let mut shown = Vec::new();
    for (nth, word) in words.iter().enumerate() {
        if nth > 0 {
            shown.push(TemplatePiece::Text(b" ".to_vec()));
        }
        if word.is_empty() {
            shown.push(TemplatePiece::Text(b"''".to_vec()));
        }
        shown.extend(word.iter().map(|piece| match piece {
            TemplatePiece::Text(text) => TemplatePiece::Text(quote_argument(text, QuoteContext::None)),
            argument => argument.clone(),
        }));
    }
    shown
}

/// Expands a replacement string into one per source.
fn expand_sources(replacement: ReplacementString, sources: usize) -> Vec<ReplacementString> {
    match replacement.value {
        ReplacementValue::All => {
            (0..sources).map(|nth| ReplacementString { value: ReplacementValue::Source(nth), ..replacement }).collect()
        }
        _ => vec![replacement],
    }
}

fn variable_for(one: ReplacementString, parameters: &mut Vec<ReplacementString>) -> String {
    if one.value == ReplacementValue::Slot {
        return SLOT_VARIABLE.into();
    }
    let known = parameters.iter().position(|parameter| *parameter == one);
    let nth = known.unwrap_or_else(|| {
        parameters.push(one);
        parameters.len() - 1
    });
    format!("gpupool_{}", nth + 1)
}

fn reference(variable: &str, quotes: QuoteContext) -> String {
    match quotes {
        QuoteContext::None | QuoteContext::Verbatim => format!("\"${variable}\""),
        QuoteContext::Double => format!("${{{variable}}}"),
        QuoteContext::Single => format!("'\"${variable}\"'"),
    }
}

/// Assigns names to the parameters, because `$1` differs within a function.
fn name_parameters(parameters: usize) -> String {
    if parameters == 0 {
        return String::new();
    }
    let names: String = (1..=parameters).map(|nth| format!("gpupool_{nth}=${{{nth}}} ")).collect();
    format!("{}; shift {parameters}; ", names.trim_end())
}

/// Replacement string, such as `{}`, `{2/.}` or `{#}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplacementString {
    pub value: ReplacementValue,
    pub part: PathPart,
}

/// Value of a replacement string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplacementValue {
    /// Arguments of all sources.
    All,
    /// Argument of one source, from 0.
    Source(usize),
    /// Number of the task, from 1.
    Sequence,
    /// Number of the worker, from 1, known only at run time.
    Slot,
}

/// Part of an argument that is a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathPart {
    /// Whole argument: `{}`.
    Whole,
    /// Without its extension: `{.}`.
    Stem,
    /// Without its directory: `{/}`.
    Name,
    /// Directory: `{//}`.
    Directory,
    /// Without directory and extension: `{/.}`.
    NameStem,
}

impl ReplacementString {
    pub const ALL: Self = Self { value: ReplacementValue::All, part: PathPart::Whole };

    /// Parses the replacement string at the start of a text and returns its length.
    pub fn parse_prefix(text: &[u8]) -> Option<(Self, usize)> {
        let end = text.iter().take(MAX_REPLACEMENT_BYTES).position(|byte| *byte == b'}')?;
        let inside = text[..end].strip_prefix(b"{")?;
        Self::parse(inside).map(|replacement| (replacement, end + 1))
    }

    fn parse(inside: &[u8]) -> Option<Self> {
        let whole = |value| Some(Self { value, part: PathPart::Whole });
        match inside {
            b"#" => return whole(ReplacementValue::Sequence),
            b"%" => return whole(ReplacementValue::Slot),
            _ => {}
        }
        let digits = inside.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let value = match std::str::from_utf8(&inside[..digits]).ok()? {
            "" => ReplacementValue::All,
            number => ReplacementValue::Source(number.parse::<usize>().ok()?.checked_sub(1)?),
        };
        let part = match &inside[digits..] {
            b"" => PathPart::Whole,
            b"." => PathPart::Stem,
            b"/" => PathPart::Name,
            b"//" => PathPart::Directory,
            b"/." => PathPart::NameStem,
            _ => return None,
        };
        Some(Self { value, part })
    }

    /// Returns one value per argument; empty for the slot, which is not known here.
    fn values(self, arguments: &[Bytes], seq: u64) -> Vec<Bytes> {
        match self.value {
            ReplacementValue::All => arguments.iter().map(|argument| self.part.apply(argument)).collect(),
            ReplacementValue::Source(nth) => {
                arguments.get(nth).map(|argument| self.part.apply(argument)).into_iter().collect()
            }
            ReplacementValue::Sequence => vec![Bytes::from(seq.to_string())],
            ReplacementValue::Slot => Vec::new(),
        }
    }
}

impl PathPart {
    fn apply(self, argument: &Bytes) -> Bytes {
        let name_at = argument.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        // Without a dot, or with nothing after it, there is no extension.
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
        let (replacement, length) =
            ReplacementString::parse_prefix(of.as_bytes()).unwrap_or_else(|| panic!("{of} is known"));
        assert_eq!(length, of.len());
        let values = replacement.values(&[Bytes::from_static(b"first"), Bytes::from_static(argument.as_bytes())], 3);
        String::from_utf8(values[0].to_vec()).unwrap()
    }

    #[test]
    fn path_parts_follow_gnu_parallel() {
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
    fn other_braces_stay_unchanged() {
        for text in ["{print}", "{", "{}x}"[3..].into(), "{0}", "{1/./}", "{-1}", "{99999999999}", "{ }", "x{}"] {
            assert_eq!(ReplacementString::parse_prefix(text.as_bytes()), None, "{text}");
        }
    }

    fn template(command: &[&str], sources: usize) -> CommandTemplate {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        CommandTemplate::parse(&command, sources).unwrap_or_else(|error| panic!("{command:?}: {error}"))
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

    /// Runs a program and returns its output.
    fn output(argv: &[OsString]) -> Vec<u8> {
        let output = Command::new(&argv[0]).args(&argv[1..]).env("GPUPOOL_SLOT", "3").output().unwrap();
        assert!(output.status.success(), "{argv:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    #[test]
    fn several_words_are_executed_without_a_shell() {
        assert_eq!(argv(&["cp", "--", "{}", "out/{/.} $x"], &["a b.c"]), ["cp", "--", "a b.c", "out/a b $x"]);
        assert_eq!(
            argv(&["echo", "x"], &["a", "b c"]),
            ["echo", "x", "a", "b c"],
            "appended without a replacement string"
        );
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
    fn without_a_command_the_argument_is_the_command() {
        let argv = template(&[], 1).argv(&arguments(&["printf %s x | tr x y"]), 1);
        assert_eq!(output(&argv), b"y");
        assert_eq!(shown(&[], &["a | b"]), "a | b");
    }

    #[test]
    fn the_shown_command_can_be_typed() {
        assert_eq!(
            shown(&["cat {} \"{/}\" '{}' | wc"], &["it's $1"]),
            r#"cat 'it'\''s $1' "it's \$1" 'it'\''s $1' | wc"#
        );
        assert_eq!(shown(&["true {%}"], &["a"]), "true {%}");
    }

    #[test]
    fn the_slot_is_known_at_run_time() {
        for command in [&["printf '%s' {%}{}"][..], &["printf", "%s", "{%}{}"]] {
            assert_eq!(output(&template(command, 1).argv(&arguments(&["a b"]), 1)), b"3a b", "{command:?}");
        }
    }

    #[test]
    fn unsupported_positions_of_an_argument_are_refused_with_a_remedy() {
        let refused = |text: &str, sources| CommandTemplate::parse(&[text.into()], sources).unwrap_err().to_string();
        assert!(refused("echo `cat {}`", 1).contains("$(…)"));
        assert!(refused("echo $(({}+1))", 1).contains("x={}"));
        assert!(refused("echo {3}", 2).contains("1 to 2"));
    }

    /// Texts with the argument in every kind of quotes; each prints only the argument.
    const QUOTE_EXAMPLES: [&str; 9] = [
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
        fn a_real_shell_takes_every_argument_literally(argument in "[ -~\\n\\t$'\"`\\\\*]{0,12}", place in 0..QUOTE_EXAMPLES.len()) {
            let template = template(&[QUOTE_EXAMPLES[place]], 1);
            let given = [Bytes::from(argument.clone().into_bytes())];
            let expected = if QUOTE_EXAMPLES[place].contains("sed") && argument.is_empty() { Vec::new() } else { argument.clone().into_bytes() };
            prop_assert_eq!(output(&template.argv(&given, 1)), expected.clone(), "run: {}", QUOTE_EXAMPLES[place]);
            let typed = OsString::from_vec(template.shown(&given, 1));
            let by_hand = output(&["sh".into(), "-c".into(), typed.clone()]);
            prop_assert_eq!(by_hand, expected, "typed: {:?}", typed);
        }

        #[test]
        fn parsing_any_command_never_panics(
            command in prop::collection::vec("[a{}#%/.0-9 '\"`$()\\\\]{0,12}", 0..4), given in prop::collection::vec(any::<Vec<u8>>(), 1..3)
        ) {
            let command: Vec<OsString> = command.into_iter().map(OsString::from).collect();
            let given: Vec<Bytes> = given.into_iter().map(Bytes::from).collect();
            if let Ok(template) = CommandTemplate::parse(&command, given.len()) {
                template.argv(&given, 1);
                template.shown(&given, 1);
            }
        }
    }
}
