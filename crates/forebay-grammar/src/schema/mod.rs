//! Schemas of answers, as the compiler can follow them.
//!
//! The compiler refuses a whole schema for one keyword that it does not have. So that part is left out, and a remark says so:
//! the answer may then break this part of the schema, and follows the rest. Objects are closed unless the schema says
//! otherwise, because models invent keys, and numbers have a bounded number of digits, because a model could go on forever.

mod bounded;
mod names;
mod patterns;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use names::{Names, target};

/// Deepest nesting of schemas that is followed. Deeper ones stay as they are.
const DEPTH_MAX: usize = 64;

/// Most remarks on one schema.
const REMARKS_MAX: usize = 16;

/// Name of the definition of any value.
const ANY: &str = "forebay-any";

/// A schema that can be followed.
#[derive(Debug, Clone, PartialEq)]
pub struct Loosened {
    pub schema: Value,
    /// What answers may not follow, in sentences that begin with the place in the schema.
    pub remarks: Vec<String>,
}

/// Formats of texts that are followed.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords that the compiler does not have.
const NOT_ENFORCED: [&str; 19] = [
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
];

/// Keywords whose values are whole numbers.
const COUNTS: [&str; 6] =
    ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"];

const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];

/// Returns a schema that the compiler can follow, with remarks on what it leaves out.
pub fn loosen(schema: &Value) -> Loosened {
    let mut walk = Walk {
        root: schema,
        patterns: patterns::bad(schema),
        remarks: Vec::new(),
        open: BTreeMap::new(),
        waiting: Vec::new(),
        has_ids: has_ids(schema, 0),
        uses_any: false,
    };
    let mut loosened = walk.value(schema, "", 0);
    let mut definitions = Map::new();
    while let Some((pointer, name)) = walk.waiting.pop() {
        if let Some(target) = target(schema, &pointer) {
            let place = Place { is_open: true, ..Place::default() };
            definitions.insert(name, walk.schema(target, &place, &pointer, 1));
        }
    }
    if walk.uses_any {
        let any = json!({ "$ref": format!("#/$defs/{ANY}") });
        let types = ["null", "boolean", "string"].map(|name| json!({ "type": name }));
        let mut options = types.to_vec();
        options.push(bounded::number());
        options.push(json!({ "type": "array", "items": any }));
        options.push(json!({ "type": "object", "additionalProperties": any }));
        definitions.insert(ANY.to_owned(), json!({ "anyOf": options }));
    }
    if !definitions.is_empty()
        && let Value::Object(fields) = &mut loosened
        && let Value::Object(all) = fields.entry("$defs").or_insert_with(|| json!({}))
    {
        all.extend(definitions);
    }
    Loosened { schema: loosened, remarks: walk.remarks }
}

/// Returns true if a schema within the schema has a name of its own, which other references start from.
fn has_ids(schema: &Value, depth: usize) -> bool {
    match schema {
        Value::Object(fields) => {
            let own = depth > 0 && fields.get("$id").is_some_and(Value::is_string);
            own || fields.values().any(|value| has_ids(value, depth + 1))
        }
        Value::Array(all) => all.iter().any(|value| has_ids(value, depth + 1)),
        _ => false,
    }
}

/// Where a schema is.
#[derive(Default, Clone)]
struct Place {
    /// True if another schema closes the object that this one is a part of.
    is_open: bool,
    /// Names that the object may have by other schemas that hold for it.
    names: BTreeSet<String>,
}

struct Walk<'a> {
    root: &'a Value,
    /// Regular expressions that are not followed.
    patterns: BTreeSet<String>,
    remarks: Vec<String>,
    /// Names of definitions that are copies of others, but do not close their objects.
    open: BTreeMap<String, String>,
    /// Copies that are not written yet.
    waiting: Vec<(String, String)>,
    has_ids: bool,
    uses_any: bool,
}

impl Walk<'_> {
    fn remark(&mut self, path: &str, why: &str) {
        let path = if path.is_empty() { "schema" } else { path };
        let remark = format!("{path}: {why}");
        if self.remarks.len() < REMARKS_MAX && !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    /// Returns the schema of a whole value.
    fn value(&mut self, schema: &Value, path: &str, depth: usize) -> Value {
        let mut schema = self.schema(schema, &Place::default(), path, depth);
        if let Value::Object(fields) = &mut schema
            && !has_one(fields, &["type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"])
        {
            let kind = match () {
                () if has_one(fields, &["properties", "required", "patternProperties"]) => "object",
                () if has_one(fields, &["items", "prefixItems"]) => "array",
                () if has_one(fields, &["pattern", "format", "minLength", "maxLength"]) => "string",
                () if bounded::has_bounds(fields) => "number",
                () => return self.any(schema, depth),
            };
            fields.insert("type".to_owned(), kind.into());
            bounded::limit(fields);
        }
        match schema {
            Value::Bool(true) => self.any(schema, depth),
            schema => schema,
        }
    }

    /// Returns any value, with the remarks of a schema that says nothing.
    fn any(&mut self, schema: Value, depth: usize) -> Value {
        if self.has_ids {
            return schema;
        }
        self.uses_any = true;
        let mut fields = match schema {
            // Definitions that others refer to may be there.
            Value::Object(fields) if depth == 0 => fields,
            _ => Map::new(),
        };
        fields.insert("$ref".to_owned(), format!("#/$defs/{ANY}").into());
        fields.into()
    }

    fn schema(&mut self, schema: &Value, place: &Place, path: &str, depth: usize) -> Value {
        let Value::Object(fields) = schema else { return schema.clone() };
        if depth > DEPTH_MAX {
            return schema.clone();
        }
        let mut out = Map::new();
        for (key, value) in fields {
            if let Some(value) = self.keyword(key, value, fields, path, depth) {
                out.insert(key.clone(), value);
            }
        }
        self.objects(schema, &mut out, place, path, depth);
        bounded::limit(&mut out);
        self.counts(&mut out, path);
        out.into()
    }

    /// Returns the value of a keyword, or `None` if it is left out. Schemas that hold for the same value come later.
    fn keyword(
        &mut self,
        key: &str,
        value: &Value,
        fields: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Option<Value> {
        let inner = |name: &str| match path.is_empty() {
            true => name.to_owned(),
            false => format!("{path}.{name}"),
        };
        let is_null = value.is_null();
        Some(match key {
            "const" | "enum" | "default" | "examples" => value.clone(),
            _ if is_null => return None,
            "properties" | "$defs" | "definitions" => match value {
                Value::Object(all) => {
                    let of = |(name, value): (&String, &Value)| {
                        let path = inner(name);
                        (name.clone(), self.value(value, &path, depth + 1))
                    };
                    Value::Object(all.iter().map(of).collect())
                }
                other => other.clone(),
            },
            "items" | "prefixItems" => match value {
                Value::Array(all) => {
                    let path = inner(key);
                    all.iter().map(|value| self.value(value, &path, depth + 1)).collect()
                }
                one => self.value(one, &inner(key), depth + 1),
            },
            "additionalItems" | "additionalProperties" => self.value(value, &inner(key), depth + 1),
            "patternProperties" => return self.pattern_properties(value, path, depth),
            // These come later.
            "allOf" | "anyOf" | "oneOf" | "$ref" => return None,
            "format" if value.as_str().is_some_and(|name| FORMATS.contains(&name)) => value.clone(),
            "format" => {
                self.remark(path, &format!("format {value} is not enforced"));
                return None;
            }
            "pattern" if value.as_str().is_some_and(|text| self.patterns.contains(text)) => {
                self.remark(path, &format!("pattern {value} is not enforced"));
                return None;
            }
            "required" if !value.is_array() => return None,
            "$schema" if !names::is_known_draft(value) => return None,
            "type" => return self.kind(value, path),
            "uniqueItems" if *value == false => return None,
            "unevaluatedProperties" if *value == false => return None,
            _ if COUNTS.contains(&key) => return bounded::count(value),
            "then" | "else" if !fields.contains_key("if") => return None,
            key if NOT_ENFORCED.contains(&key) => {
                if !key.ends_with("nchor") && !matches!(key, "then" | "else" | "$vocabulary") {
                    self.remark(path, &format!("{key} is not enforced"));
                }
                return None;
            }
            _ => value.clone(),
        })
    }

    /// Returns the types that exist.
    fn kind(&mut self, value: &Value, path: &str) -> Option<Value> {
        let is_known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
        let known = match value {
            Value::Array(all) => all.iter().all(is_known) && !all.is_empty(),
            one => is_known(one),
        };
        if !known {
            self.remark(path, &format!("type {value} is not known, so it is not enforced"));
        }
        known.then(|| value.clone())
    }

    fn pattern_properties(&mut self, value: &Value, path: &str, depth: usize) -> Option<Value> {
        let Value::Object(all) = value else { return None };
        if all.keys().any(|pattern| self.patterns.contains(pattern)) || !patterns::are_disjoint(all)
        {
            self.remark(path, "patternProperties is not enforced");
            return None;
        }
        let of = |(pattern, value): (&String, &Value)| {
            (pattern.clone(), self.value(value, path, depth + 1))
        };
        Some(Value::Object(all.iter().map(of).collect()))
    }

    /// Leaves out numbers of properties that the compiler cannot count.
    fn counts(&mut self, out: &mut Map<String, Value>, path: &str) {
        let counts = ["minProperties", "maxProperties"];
        if !has_one(out, &counts) {
            return;
        }
        let properties = out.get("properties").and_then(Value::as_object);
        let required: BTreeSet<&str> = names::texts(out.get("required")).collect();
        let are_required =
            properties.is_none_or(|all| all.keys().all(|name| required.contains(name.as_str())));
        let may_be_combined = has_one(out, &["allOf", "anyOf", "oneOf", "$ref"]);
        if !are_required || may_be_combined {
            for name in counts {
                if out.remove(name).is_some() {
                    self.remark(path, &format!("{name} is not enforced"));
                }
            }
        }
    }

    /// Adds the schemas that hold for the same value, and closes its objects.
    fn objects(
        &mut self,
        schema: &Value,
        out: &mut Map<String, Value>,
        place: &Place,
        path: &str,
        depth: usize,
    ) {
        let is_dropped = schema.get("patternProperties").is_some_and(|all| !all.is_null())
            && !out.contains_key("patternProperties");
        if is_dropped && out.get("additionalProperties").is_none_or(|more| *more == false) {
            // Which names are allowed is not known any more.
            let any = self.value(&Value::Bool(true), path, depth + 1);
            out.insert("additionalProperties".to_owned(), any);
        }
        if schema.get("unevaluatedProperties").is_some_and(|more| *more != false && !more.is_null())
        {
            let any = self.value(&Value::Bool(true), path, depth + 1);
            out.entry("additionalProperties").or_insert(any);
        }
        let own = Names::of_object(schema);
        let all_of = Names::of_all(self.root, schema, &["allOf"]);
        let by_reference = Names::of_reference(self.root, schema);
        let conditional = Names::of_conditions(self.root, schema);
        let any_of = Names::of_all(self.root, schema, &["anyOf"]);
        let one_of = Names::of_all(self.root, schema, &["oneOf"]);
        let is_explicit = out.contains_key("additionalProperties");
        let options_have = any_of.has_properties || one_of.has_properties;
        let has_other = own.has_properties
            || all_of.has_properties
            || conditional.has_properties
            || options_have;

        let mut names = place.names.clone();
        for of in [&own, &all_of, &by_reference, &conditional] {
            names.extend(of.names.iter().cloned());
        }
        let parts = schema.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
        // One schema alone closes its own objects.
        let is_alone = !own.has_properties
            && !options_have
            && !conditional.has_properties
            && place.names.is_empty()
            && parts + usize::from(by_reference.has_properties) <= 1;
        let is_said_open = all_of.is_open || by_reference.is_open;
        let closes = !place.is_open && !is_explicit && !is_alone;
        let within_all = match closes || place.is_open || is_explicit {
            true => Place { is_open: true, names: BTreeSet::new() },
            false => Place::default(),
        };
        self.reference(schema, out, &within_all, path);
        self.list(schema, out, "allOf", &within_all, path, depth);
        for (key, others) in [("anyOf", &one_of), ("oneOf", &any_of)] {
            let within = match closes && options_have && !is_said_open {
                true => {
                    let names = names.iter().chain(&others.names).cloned().collect();
                    Place { is_open: false, names }
                }
                false if closes && !has_other => Place { is_open: false, names: names.clone() },
                false => within_all.clone(),
            };
            self.list(schema, out, key, &within, path, depth);
        }
        let has_names = own.has_properties
            || all_of.has_properties
            || conditional.has_properties
            || by_reference.has_properties
            || !place.names.is_empty() && names::is_object(schema);
        if closes && !options_have && has_names && !is_said_open {
            names.extend(any_of.names.into_iter().chain(one_of.names));
            self.close(out, &names);
        } else if !closes
            && is_alone
            && own.is_plain_object(schema)
            && !is_explicit
            && !place.is_open
        {
            let any = self.value(&Value::Bool(true), path, depth + 1);
            out.insert("additionalProperties".to_owned(), any);
        }
    }

    /// Closes an object, which may have these names only.
    fn close(&mut self, out: &mut Map<String, Value>, names: &BTreeSet<String>) {
        let properties = out.entry("properties").or_insert_with(|| json!({}));
        let Value::Object(properties) = properties else { return };
        for name in names {
            properties.entry(name.as_str()).or_insert(Value::Bool(true));
        }
        out.insert("additionalProperties".to_owned(), Value::Bool(false));
    }

    fn list(
        &mut self,
        schema: &Value,
        out: &mut Map<String, Value>,
        key: &str,
        place: &Place,
        path: &str,
        depth: usize,
    ) {
        let Some(value) = schema.get(key).filter(|value| !value.is_null()) else { return };
        let Value::Array(all) = value else {
            out.insert(key.to_owned(), value.clone());
            return;
        };
        if key == "oneOf" && !names::are_disjoint(self.root, all) {
            self.remark(path, "oneOf: an answer may fit several of the schemas");
        }
        let of = |schema| self.schema(schema, place, path, depth + 1);
        let all: Value = all.iter().map(of).collect();
        out.insert(key.to_owned(), all);
    }

    /// Adds the reference to another schema.
    fn reference(
        &mut self,
        schema: &Value,
        out: &mut Map<String, Value>,
        place: &Place,
        path: &str,
    ) {
        let Some(reference) = schema.get("$ref").filter(|value| !value.is_null()) else { return };
        let pointer = reference.as_str().unwrap_or_default();
        let is_local = self.has_ids || target(self.root, pointer).is_some();
        if !is_local {
            self.remark(path, &format!("$ref {reference} leads nowhere, so it is not enforced"));
            return;
        }
        if !place.is_open || self.has_ids {
            out.insert("$ref".to_owned(), reference.clone());
            return;
        }
        let count = self.open.len();
        let name = self.open.entry(pointer.to_owned()).or_insert_with(|| {
            let name = format!("forebay-open-{count}");
            self.waiting.push((pointer.to_owned(), name.clone()));
            name
        });
        out.insert("$ref".to_owned(), format!("#/$defs/{name}").into());
    }
}

/// Returns true if an object has one of these fields.
fn has_one(fields: &Map<String, Value>, names: &[&str]) -> bool {
    names.iter().any(|name| fields.contains_key(*name))
}

#[cfg(test)]
mod tests;
