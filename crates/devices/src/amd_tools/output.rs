//! Search for JSON in a tool's output: after warnings and shell prompts, with several documents in a row, or cut off.

use serde_json::Value;

use crate::limits;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Maximum number of brackets that start no JSON before the search ends.
const MAX_WRONG_STARTS: usize = 64;

/// JSON documents in a text.
#[derive(Debug, Default)]
pub(crate) struct ExtractedJson {
    /// Documents, in order.
    pub documents: Vec<Value>,
    /// Lines outside of the documents.
    pub lines: Vec<String>,
    /// Reason why the last document was repaired or could not be parsed.
    pub problem: Option<String>,
}

/// Finds every top-level object and list in `text`. A truncated document keeps the devices before the cut.
pub(crate) fn find_json(text: &str) -> ExtractedJson {
    let text = with_quoted_nan(text);
    let found = find_strict_json(&text);
    if !found.documents.is_empty() || found.problem.is_none() {
        return found;
    }
    // A person who shortens the output leaves dots and commas.
    let shortened = find_strict_json(&without_leftovers(&text));
    if shortened.documents.is_empty() { found } else { shortened }
}

fn find_strict_json(text: &str) -> ExtractedJson {
    let (mut found, mut outside) = (ExtractedJson::default(), String::new());
    let (mut rest, mut wrong) = (text, 0);
    while let Some(start) = next_start(rest) {
        let (before, candidate) = rest.split_at(start);
        outside.push_str(before);
        match first_value(candidate) {
            Ok((value, length)) => {
                found.documents.push(value);
                rest = candidate.get(length..).unwrap_or_default();
            }
            Err(error) if error.is_eof() => {
                let kept = close_after_last_device(candidate).and_then(|repaired| serde_json::from_str(&repaired).ok());
                found.documents.extend::<Option<Value>>(kept);
                found.problem = Some(format!("truncated JSON: {error}"));
                found.lines = lines_outside(&outside);
                return found;
            }
            Err(error) => {
                found.problem.get_or_insert_with(|| error.to_string());
                wrong += 1;
                let line = candidate.find('\n').map_or(candidate.len(), |end| end + 1);
                // A bracket in a warning starts no document; JSON may still follow on the same line.
                let skip = next_start(&candidate[1..]).map_or(line, |next| (next + 1).min(line));
                outside.push_str(&candidate[..skip]);
                rest = &candidate[skip..];
                if wrong >= MAX_WRONG_STARTS {
                    break;
                }
            }
        }
    }
    outside.push_str(rest);
    found.lines = lines_outside(&outside);
    if !found.documents.is_empty() {
        found.problem = None;
    }
    found
}

/// Returns the position of the next bracket.
fn next_start(text: &str) -> Option<usize> {
    text.find(['{', '['])
}

/// Parses the value at the start of a text and returns its length. Only objects and lists of objects count.
fn first_value(text: &str) -> Result<(Value, usize), serde_json::Error> {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = stream.next().unwrap_or(Ok(Value::Null))?;
    let is_data = match &value {
        Value::Object(_) => true,
        Value::Array(items) => items.iter().all(Value::is_object),
        _ => false,
    };
    if is_data {
        Ok((value, stream.byte_offset()))
    } else {
        Err(serde::de::Error::custom("neither an object nor a list of objects"))
    }
}

/// Returns the lines outside of JSON, without blank lines and shell commands.
fn lines_outside(text: &str) -> Vec<String> {
    let is_relevant = |line: &&str| !line.is_empty() && !is_command(line);
    let short = |line: &str| line.chars().take(limits::TEXT_CHARS).collect();
    text.lines().map(str::trim).filter(is_relevant).take(limits::WARNINGS).map(short).collect()
}

/// Whether a line is a shell command, with or without a prompt.
fn is_command(line: &str) -> bool {
    let is_tool = |word: &str| ["amd-smi", "rocm-smi"].iter().any(|tool| word.ends_with(tool));
    let typed = line.split_once(['$', '#']).map_or(line, |(_, typed)| typed);
    typed.split_whitespace().find(|word| *word != "sudo").is_none_or(is_tool)
}

/// Closes a truncated document after its last whole device; `None` if there is none.
///
/// A device is an object directly in the root, or in a list directly in the root.
fn close_after_last_device(text: &str) -> Option<String> {
    let mut open: Vec<u8> = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    let mut cut: Option<(usize, Vec<u8>)> = None;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => open.push(byte),
            b'}' | b']' => {
                open.pop();
                if byte == b'}' && matches!(open.as_slice(), b"[" | b"{" | b"{[") {
                    cut = Some((at + 1, open.clone()));
                }
            }
            _ => {}
        }
    }
    let (at, open) = cut?;
    let closing = open.iter().rev().map(|&byte| if byte == b'{' { '}' } else { ']' });
    Some(text.get(..at)?.chars().chain(closing).collect())
}

/// Removes `...` and commas before closing brackets, outside of JSON strings.
fn without_leftovers(text: &str) -> String {
    let text: String =
        text.lines().filter(|line| line.trim().trim_end_matches(',') != "...").flat_map(|line| [line, "\n"]).collect();
    let mut out = String::with_capacity(text.len());
    let (mut in_string, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            '\n' => in_string = false,
            ',' if !in_string && text[at + 1..].trim_start().starts_with(['}', ']']) => continue,
            _ => {}
        }
        out.push(c);
    }
    out
}

/// Quotes Python's bare `NaN` and `Infinity`, which are invalid JSON; a quoted one still parses as no number.
fn with_quoted_nan(text: &str) -> String {
    if !text.contains("NaN") && !text.contains("Infinity") {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len() + 64);
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word = ["NaN", "-Infinity", "Infinity"].into_iter().find(|word| !in_string && rest.starts_with(word));
        if let Some(word) = word {
            out.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        match first {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            // An unpaired quote in a warning must not invert the rest: no JSON string spans lines.
            '\n' => in_string = false,
            _ => {}
        }
        out.push(first);
        rest = &rest[first.len_utf8()..];
    }
    out
}

// Error texts of AMD's tools. Exit codes are unreliable: rocm-smi fails with 0.

/// Lowercase phrases for a missing driver.
const NO_DRIVER: [&str; 6] = [
    "driver not initialized",
    "not found in modules",
    "module is not loaded",
    "driver not loaded",
    "driver_not_loaded",
    "/dev/kfd read-write: no such file",
];
/// Lowercase phrases for missing permission.
const NO_PERMISSION: [&str; 5] =
    ["permission denied", "no_perm", "requires elevation", "is not member of", "missing the following required groups"];
/// Lowercase phrases of the shell for a missing tool.
const NO_TOOL: [&str; 2] = ["command not found", "-smi: not found"];
/// Lowercase phrases for a machine without a device.
const NO_DEVICES: [&str; 7] = [
    "no json data to report",
    "no drm devices",
    "no amd gpus",
    "no gpus",
    "no devices",
    "device not found",
    "unable to detect any gpu",
];
/// Lowercase phrases for other errors.
const OTHER_ERRORS: [&str; 9] = [
    "error:",
    "error=",
    "error code",
    "init_error",
    "failed to",
    "failure",
    "exception",
    "is invalid",
    "the expected value is 0",
];
/// Names by which AMD's tools identify themselves; the kernel uses others.
const TOOL_NAMES: [&str; 8] =
    ["amdsmi", "amd-smi", "rocm-smi", "rocm_smi", "rocm smi", "rsmi_", "hsa api call", "/dev/kfd"];

/// Interprets output without any device.
///
/// A tool that reports no device has succeeded; one that reports an error has failed; any other text is malformed.
pub(crate) fn interpret_without_devices(lines: &[String], format: &'static str) -> Result<SourceReading, SourceError> {
    let find_line = |words: &[&str]| {
        lines.iter().find(|line| words.iter().any(|word| line.to_ascii_lowercase().contains(word))).cloned()
    };
    if let Some(line) = find_line(&NO_DRIVER) {
        return Err(SourceError::DriverNotLoaded(line));
    }
    if let Some(line) = find_line(&NO_PERMISSION) {
        return Err(SourceError::NoPermission(line));
    }
    if let Some(why) = find_line(&NO_TOOL) {
        let tool = ["amd-smi", "rocm-smi"].into_iter().find(|tool| why.contains(tool)).unwrap_or(format);
        return Err(SourceError::NotPresent { what: tool.into(), why });
    }
    if let Some(line) = find_line(&NO_DEVICES) {
        return Ok(SourceReading { warnings: vec![line], ..SourceReading::default() });
    }
    if let Some(line) = find_line(&OTHER_ERRORS) {
        return Err(SourceError::Driver(line));
    }
    let first = lines.first().map_or("nothing", String::as_str);
    Err(SourceError::malformed(format, format!("no device is in the output; it begins with: {first}")))
}

/// Whether the text is an error text of a tool.
pub(crate) fn is_error_text(text: &str) -> bool {
    let start: String = text.chars().take(limits::TEXT_CHARS).collect::<String>().to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| start.contains(word));
    let is_of_tool = has(&TOOL_NAMES) || has(&["required groups: render", "required groups: video"]);
    let complains = [&NO_PERMISSION[..], &NO_TOOL, &NO_DEVICES, &OTHER_ERRORS].into_iter().any(has);
    has(&NO_DRIVER) || has(&["unable to detect any gpu", "no amd gpus", "no drm devices"]) || is_of_tool && complains
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_found_after_prompts_and_warnings() {
        let text = "$ amd-smi list --json\nWARNING: [render] group is missing {x}\n[{\"gpu\": 0}]\n";
        let found = find_json(text);
        assert_eq!(found.documents, [json!([{"gpu": 0}])]);
        assert_eq!(found.lines.concat(), "WARNING: [render] group is missing {x}");
        assert_eq!(found.problem, None);
    }

    #[test]
    fn documents_in_a_row_are_all_found() {
        assert_eq!(find_json("{\"card0\": {}}{\"card0\": {\"a\": 1}}\n[]").documents.len(), 3);
    }

    #[test]
    fn a_document_cut_off_keeps_the_whole_devices_before_the_cut() {
        let cards = find_json(r#"{"card0": {"a": "}"}, "card1": {"a": {"b": 1}}, "card2": {"a": {"c": 2}, "#);
        assert_eq!(cards.documents, [json!({"card0": {"a": "}"}, "card1": {"a": {"b": 1}}})]);
        assert!(cards.problem.is_some());
        let list = find_json(r#"{"gpu_data": [{"gpu": 0, "asic": {}}, {"gpu": 1, "asic": {"x": 1}, "#);
        assert_eq!(list.documents, [json!({"gpu_data": [{"gpu": 0, "asic": {}}]})]);
        let none = find_json(r#"[{"gpu": 0, "asic": {"#);
        assert!(none.documents.is_empty() && none.problem.is_some());
    }

    #[test]
    fn a_document_shortened_by_a_person_is_still_read() {
        let found = find_json("$ amd-smi list --json\n[\n{\"gpu\": 0, \"x\": \"a,]\",\n},\n...\n]\n");
        assert_eq!(found.documents, [json!([{"gpu": 0, "x": "a,]"}])]);
        assert_eq!(found.problem, None);
    }

    #[test]
    fn nan_and_infinity_are_kept_as_text() {
        let found = find_json(r#"{"card0": {"GPU use (%)": NaN, "name": "NaN [x]", "t": -Infinity}}"#);
        assert_eq!(found.documents, [json!({"card0": {"GPU use (%)": "NaN", "name": "NaN [x]", "t": "-Infinity"}})]);
    }

    fn meaning(line: &str) -> Result<SourceReading, SourceError> {
        interpret_without_devices(&[line.to_owned()], "test")
    }

    #[test]
    fn known_phrases_classify_output_without_devices() {
        let code = |line: &str| meaning(line).map_err(|error| error.code());
        assert_eq!(code("ERROR:root:Driver not initialized (amdgpu not found in modules)"), Err("driver_not_loaded"));
        assert_eq!(code("ROCk module is NOT loaded, possibly no GPU devices"), Err("driver_not_loaded"));
        assert_eq!(code("Unable to open /dev/kfd read-write: Permission denied"), Err("no_permission"));
        assert_eq!(code("RuntimeError: hsa api call failure at line 1"), Err("driver_failed"));
        assert_eq!(code("hello"), Err("malformed"));
        assert_eq!(code("bash: rocm-smi: command not found"), Err("not_here"));
        assert!(meaning("WARNING: No JSON data to report").unwrap().devices.is_empty());
    }

    #[test]
    fn error_texts_of_tools_are_recognized() {
        for (text, code) in [
            ("ERROR:root:Driver not initialized (amdgpu not found in modules)", "driver_not_loaded"),
            ("AmdSmiException: Error code:\n\t34 | AMDSMI_STATUS_DRIVER_NOT_LOADED", "driver_not_loaded"),
            ("AmdSmiLibraryException: Error code:\n\t10 | AMDSMI_STATUS_NO_PERM - Permission Denied", "no_permission"),
            ("User is missing the following required groups: render, video.", "no_permission"),
            ("ERROR: Failed to initialize amdsmi: AMDSMI_STATUS_INIT_ERROR", "driver_failed"),
            ("rsmi_init() failed\nERROR:root:ROCm SMI returned 8 (the expected value is 0)", "driver_failed"),
            ("sh: 1: amd-smi: not found", "not_here"),
        ] {
            assert!(is_error_text(text), "{text}");
            assert_eq!(interpret_without_devices(&find_json(text).lines, "test").unwrap_err().code(), code, "{text}");
        }
        let none = "ERROR:root:Unable to detect any GPU devices, check amdgpu version and module status";
        assert!(is_error_text(none) && meaning(none).unwrap().devices.is_empty());
        for other in [
            "amdgpu 0000:03:00.0: amdgpu: failed to write reg 28b4 wait reg 28c6",
            "bash: nvidia-smi: command not found",
            "Permission denied",
        ] {
            assert!(!is_error_text(other), "{other}");
        }
    }
}
