//! Checks responses against the schemas of `/openapi.json`. A keyword that this check does not know is a panic, so that no
//! schema passes unchecked.

use serde_json::Value;

/// The OpenAPI document of an agent.
pub struct OpenApiDocument(pub Value);

impl OpenApiDocument {
    /// Returns every method and route of the document.
    pub fn operations(&self) -> Vec<(String, String)> {
        let paths = self.0["paths"].as_object().unwrap().iter();
        let of_path = |(path, item): (&String, &Value)| {
            let methods: Vec<String> = item.as_object().unwrap().keys().map(|method| method.to_uppercase()).collect();
            methods.into_iter().map(|method| (method, path.clone())).collect::<Vec<_>>()
        };
        paths.flat_map(of_path).collect()
    }

    /// Returns every difference between a response and the document.
    pub fn differences(&self, method: &str, route: &str, status: u16, media: &str, body: &Value) -> Vec<String> {
        let operation = &self.0["paths"][route][method.to_lowercase()];
        let responses = operation["responses"].as_object();
        let Some(responses) = responses else { return vec![format!("{method} {route} is not documented")] };
        let Some(response) = responses.get(&status.to_string()).or_else(|| responses.get("default")) else {
            return vec![format!("status {status} is not documented")];
        };
        let Some(content) = response.get("content").and_then(Value::as_object) else {
            return if body.is_null() { Vec::new() } else { vec![format!("a body is not documented: {body}")] };
        };
        let media = media.split(';').next().unwrap_or("").trim();
        let Some(schema) = content.get(media).map(|content| &content["schema"]) else {
            return vec![format!("the media type {media:?} is not documented")];
        };
        let mut found = Vec::new();
        self.check(schema, body, "body", &mut found);
        found
    }

    fn check(&self, schema: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
        let Some(schema) = schema.as_object() else { return };
        let mut report = |what: String| found.push(format!("{at}: {what}, and is {value}"));
        for (keyword, expected) in schema {
            match keyword.as_str() {
                "description" | "title" | "example" | "examples" | "default" | "format" | "propertyNames" => {}
                "$ref" => {
                    let name = expected.as_str().unwrap().trim_start_matches('#');
                    let target = self.0.pointer(name).unwrap_or_else(|| panic!("{name} leads nowhere"));
                    self.check(target, value, at, found);
                    return;
                }
                "type" => {
                    let names: Vec<&str> = match expected {
                        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
                        one => one.as_str().into_iter().collect(),
                    };
                    if !names.iter().any(|name| has_type(name, value)) {
                        report(format!("must be {}", names.join(" or ")));
                    }
                }
                "minimum" if value.as_f64().is_some_and(|number| number < expected.as_f64().unwrap()) => {
                    report(format!("must be at least {expected}"));
                }
                "maximum" if value.as_f64().is_some_and(|number| number > expected.as_f64().unwrap()) => {
                    report(format!("must be at most {expected}"));
                }
                "enum" if !expected.as_array().unwrap().contains(value) => report(format!("must be one of {expected}")),
                "required" if value.is_object() => {
                    for name in expected.as_array().unwrap() {
                        if value.get(name.as_str().unwrap()).is_none() {
                            report(format!("lacks {name}"));
                        }
                    }
                }
                "minimum" | "maximum" | "enum" | "required" => {}
                "properties" | "additionalProperties" | "items" | "oneOf" | "anyOf" | "allOf" => {}
                other => panic!("{at}: the schema keyword {other:?} is unknown"),
            }
        }
        self.check_inside(schema, value, at, found);
    }

    fn check_inside(&self, schema: &serde_json::Map<String, Value>, value: &Value, at: &str, found: &mut Vec<String>) {
        let properties = schema.get("properties").and_then(Value::as_object);
        for (name, inner) in value.as_object().into_iter().flatten() {
            let at = format!("{at}.{name}");
            match (properties.and_then(|properties| properties.get(name)), schema.get("additionalProperties")) {
                (Some(schema), _) => self.check(schema, inner, &at, found),
                (None, Some(Value::Bool(false))) => found.push(format!("{at}: is not documented")),
                (None, Some(schema)) => self.check(schema, inner, &at, found),
                (None, None) if properties.is_some() => found.push(format!("{at}: is not documented")),
                (None, None) => {}
            }
        }
        if let (Some(schema), Some(items)) = (schema.get("items"), value.as_array()) {
            for (place, inner) in items.iter().enumerate() {
                self.check(schema, inner, &format!("{at}[{place}]"), found);
            }
        }
        let fits = |schema: &&Value| {
            let mut differences = Vec::new();
            self.check(schema, value, at, &mut differences);
            differences.is_empty()
        };
        let choices = |word: &str| schema.get(word).and_then(Value::as_array);
        if let Some(choices) = choices("oneOf").or(choices("anyOf"))
            && !choices.iter().any(|choice| fits(&choice))
        {
            found.push(format!("{at}: matches no alternative, and is {value}"));
        }
        for all in choices("allOf").into_iter().flatten() {
            self.check(all, value, at, found);
        }
    }
}

fn has_type(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the type {other:?} is unknown"),
    }
}

#[test]
fn differences_from_a_schema_are_found() {
    let schema = serde_json::json!({
        "type": "object", "required": ["a", "b"],
        "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"type": ["string", "null"]}, "c": {"enum": ["x"]}}
    });
    let document = OpenApiDocument(serde_json::json!({"paths": {"/r": {"get": {"responses": {
        "200": {"content": {"application/json": {"schema": schema}}}
    }}}}}));
    let differences = |status, media, body: Value| document.differences("GET", "/r", status, media, &body);
    assert_eq!(
        differences(200, "application/json", serde_json::json!({"a": 1, "b": null, "c": "x"})),
        Vec::<String>::new()
    );
    for bad in [
        serde_json::json!({"a": 1}),
        serde_json::json!({"a": "1", "b": "x"}),
        serde_json::json!({"a": -1, "b": "x"}),
        serde_json::json!({"a": 1.5, "b": "x"}),
        serde_json::json!({"a": 1, "b": "x", "c": "y"}),
        serde_json::json!({"a": 1, "b": "x", "d": 1}),
    ] {
        assert_eq!(differences(200, "application/json", bad.clone()).len(), 1, "{bad}");
    }
    assert!(differences(404, "application/json", Value::Null)[0].contains("404"));
    assert!(differences(200, "text/html", Value::Null)[0].contains("text/html"));
}
