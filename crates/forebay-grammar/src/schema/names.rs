//! Names of the members that an object may have by several schemas.

use std::collections::BTreeSet;

use serde_json::Value;

/// Deepest nesting of schemas for one value that is followed.
const DEPTH_MAX: usize = 12;

/// Most options that are compared with each other.
const OPTIONS_MAX: usize = 64;

/// Names by some schemas that hold for one value.
#[derive(Default)]
pub struct Names {
    pub names: BTreeSet<String>,
    /// True if one of the schemas names properties.
    pub has_properties: bool,
    /// True if one of them says that there may be more.
    pub is_open: bool,
    /// References that were followed.
    seen: BTreeSet<String>,
}

impl Names {
    /// Returns the names of a schema itself.
    pub fn of_object(schema: &Value) -> Names {
        let mut names = Names::default();
        names.add_object(schema);
        names
    }

    /// Returns the names of all schemas in these lists.
    pub fn of_all(root: &Value, schema: &Value, keys: &[&str]) -> Names {
        let mut names = Names::default();
        for part in keys.iter().filter_map(|key| schema.get(*key)?.as_array()).flatten() {
            names.add(root, part, 0);
        }
        names
    }

    /// Returns the names of the schema that a schema refers to.
    pub fn of_reference(root: &Value, schema: &Value) -> Names {
        let mut names = Names::default();
        names.add_reference(root, schema, 0);
        names
    }

    /// Returns the names of schemas that hold under a condition.
    pub fn of_conditions(root: &Value, schema: &Value) -> Names {
        let mut names = Names::default();
        names.add_conditions(root, schema, 0);
        names
    }

    /// Returns true if the schema is of objects without any names.
    pub fn is_plain_object(&self, schema: &Value) -> bool {
        !self.has_properties
            && self.names.is_empty()
            && is_object(schema)
            && schema.as_object().is_some_and(|fields| {
                !super::has_one(
                    fields,
                    &["allOf", "anyOf", "oneOf", "$ref", "enum", "const", "patternProperties"],
                )
            })
    }

    fn add(&mut self, root: &Value, schema: &Value, depth: usize) {
        if depth > DEPTH_MAX {
            return;
        }
        self.add_object(schema);
        self.add_reference(root, schema, depth);
        self.add_conditions(root, schema, depth);
        for key in ["allOf", "anyOf", "oneOf"] {
            for part in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                self.add(root, part, depth + 1);
            }
        }
    }

    fn add_object(&mut self, schema: &Value) {
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            self.has_properties |= !properties.is_empty();
            self.names.extend(properties.keys().cloned());
        }
        self.names.extend(texts(schema.get("required")).map(str::to_owned));
        let more = ["additionalProperties", "unevaluatedProperties", "patternProperties"];
        let more = more.into_iter().filter_map(|key| schema.get(key));
        self.is_open |= more.into_iter().any(|more| *more != false && !more.is_null());
    }

    fn add_reference(&mut self, root: &Value, schema: &Value, depth: usize) {
        let pointer = schema.get("$ref").and_then(Value::as_str);
        let Some(pointer) = pointer.filter(|pointer| !self.seen.contains(*pointer)) else { return };
        self.seen.insert(pointer.to_owned());
        if let Some(target) = target(root, pointer) {
            self.add(root, target, depth + 1);
        }
    }

    fn add_conditions(&mut self, root: &Value, schema: &Value, depth: usize) {
        for part in ["then", "else"].into_iter().filter_map(|key| schema.get(key)) {
            self.add(root, part, depth + 1);
        }
        for key in ["dependentSchemas", "dependentRequired", "dependencies"] {
            let all = schema.get(key).and_then(Value::as_object);
            for (name, part) in all.into_iter().flatten() {
                self.names.insert(name.clone());
                self.names.extend(texts(Some(part)).map(str::to_owned));
                self.add(root, part, depth + 1);
            }
        }
    }
}

/// Returns the texts of a list.
pub fn texts(list: Option<&Value>) -> impl Iterator<Item = &str> {
    list.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// Returns the schema that a reference within the document leads to.
pub fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    root.pointer(pointer.strip_suffix('/').unwrap_or(pointer))
}

/// Returns true if a schema says that its values are objects.
pub fn is_object(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "object",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "object"),
        _ => schema.get("properties").is_some() || schema.get("required").is_some(),
    }
}

/// Returns true if the compiler knows this draft of JSON Schema.
pub fn is_known_draft(value: &Value) -> bool {
    let known = [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
    ];
    value.as_str().is_some_and(|text| known.contains(&text.trim_end_matches('#')))
}

/// Returns true if it is plain that no value is valid by two of the schemas.
pub fn are_disjoint(root: &Value, all: &[Value]) -> bool {
    if all.len() > OPTIONS_MAX {
        return false;
    }
    let pairs = |index: usize| all[index + 1..].iter().map(move |other| (&all[index], other));
    (0..all.len()).flat_map(pairs).all(|(one, other)| differ(root, one, other, 0))
}

fn differ(root: &Value, one: &Value, other: &Value, depth: usize) -> bool {
    let [one, other] = [one, other].map(|schema| {
        let reference = schema.get("$ref").and_then(Value::as_str);
        reference.and_then(|reference| target(root, reference)).unwrap_or(schema)
    });
    if let (Some(one), Some(other)) = (constants(one), constants(other)) {
        return !one.iter().any(|value| other.contains(value));
    }
    if let (Some(one), Some(other)) = (kinds(one), kinds(other))
        && !one.iter().any(|kind| other.contains(kind))
    {
        return true;
    }
    let required = |schema: &Value, name: &str| texts(schema.get("required")).any(|n| n == name);
    let (Some(first), Some(second)) = (properties(one), properties(other)) else { return false };
    let is_object = |schema: &Value| schema.get("type").is_some_and(|kind| kind == "object");
    depth < DEPTH_MAX
        && is_object(one)
        && is_object(other)
        && first.iter().any(|(name, value)| {
            required(one, name)
                && required(other, name)
                && second.get(name).is_some_and(|other| differ(root, value, other, depth + 1))
        })
}

fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    schema.get("properties")?.as_object()
}

/// Returns the values that a schema names.
fn constants(schema: &Value) -> Option<Vec<&Value>> {
    match schema.get("const") {
        Some(value) => Some(vec![value]),
        None => Some(schema.get("enum")?.as_array()?.iter().collect()),
    }
}

/// Returns the types of a schema's values. A whole number is a number.
fn kinds(schema: &Value) -> Option<Vec<&str>> {
    let kind_of = |value: &&Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if let Some(values) = constants(schema) {
        return Some(values.iter().map(kind_of).collect());
    }
    let plain = |kind: &Value| {
        let known = ["null", "boolean", "number", "string", "array", "object"];
        match kind.as_str()? {
            "integer" => Some("number"),
            kind => known.into_iter().find(|name| *name == kind),
        }
    };
    match schema.get("type")? {
        Value::Array(all) => all.iter().map(plain).collect(),
        kind => Some(vec![plain(kind)?]),
    }
}
