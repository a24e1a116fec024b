use super::*;

fn of(schema: Value) -> Value {
    loosen(&schema).schema
}

/// Returns the names of an object's members, and true if there may be others.
fn members(schema: &Value) -> (Vec<&str>, bool) {
    let properties = schema["properties"].as_object();
    let names = properties.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    (names, schema["additionalProperties"] != false)
}

#[test]
fn objects_are_closed_unless_the_schema_says_otherwise() {
    let object = |more: Value| {
        let mut schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } } });
        if !more.is_null() {
            schema["additionalProperties"] = more;
        }
        of(schema)
    };
    assert_eq!(members(&object(Value::Null)), (vec!["a"], false));
    assert_eq!(members(&object(json!(false))), (vec!["a"], false));
    assert_eq!(members(&object(json!(true))), (vec!["a"], true));
    assert_eq!(members(&object(json!({ "type": "null" }))), (vec!["a"], true));
    // An object that names nothing has any members.
    assert_eq!(members(&of(json!({ "type": "object" }))), (vec![], true));
    // The type may be missing.
    let schema = of(json!({ "properties": { "a": {} }, "required": ["b"] }));
    assert_eq!((members(&schema), &schema["type"]), ((vec!["a", "b"], false), &json!("object")));
    // Nested ones, too.
    let inner = json!({ "type": "object", "properties": { "x": true } });
    let schema = of(json!({ "type": "array", "items": inner, "$defs": { "d": inner } }));
    assert_eq!(members(&schema["items"]), (vec!["x"], false));
    assert_eq!(members(&schema["$defs"]["d"]), (vec!["x"], false));
    let patterns = json!({ "^x": { "type": "null" } });
    let schema =
        of(json!({ "type": "object", "properties": { "a": true }, "patternProperties": patterns }));
    assert_eq!(members(&schema), (vec!["a"], false));
}

#[test]
fn schemas_for_one_value_are_closed_together() {
    let part = |name: &str| json!({ "type": "object", "properties": { name: { "type": "null" } } });
    let schema = of(json!({ "allOf": [part("a"), part("b")] }));
    assert_eq!(members(&schema), (vec!["a", "b"], false));
    assert!(schema["allOf"].as_array().unwrap().iter().all(|part| members(part).1));
    // By reference, with a copy of the definition that is open. The definition itself stays closed.
    let schema = of(
        json!({ "$defs": { "d": part("d") }, "$ref": "#/$defs/d", "properties": { "a": true } }),
    );
    assert_eq!(members(&schema), (vec!["a", "d"], false));
    assert_eq!(members(&schema["$defs"]["d"]), (vec!["d"], false));
    let name = schema["$ref"].as_str().unwrap().strip_prefix("#/$defs/").unwrap();
    assert_eq!(members(&schema["$defs"][name]), (vec!["d"], true));
    // One reference alone, as Pydantic writes it, closes itself.
    let schema = of(
        json!({ "$defs": { "d": part("d") }, "allOf": [{ "$ref": "#/$defs/d" }], "title": "x" }),
    );
    assert_eq!(schema["allOf"][0], json!({ "$ref": "#/$defs/d" }));
    // Options are closed each, with the names that hold for all of them.
    let schema = of(json!({ "properties": { "k": true }, "anyOf": [part("a"), part("b")] }));
    assert!(members(&schema).1);
    assert_eq!(members(&schema["anyOf"][0]), (vec!["a", "k"], false));
    assert_eq!(members(&schema["anyOf"][1]), (vec!["b", "k"], false));
    let schema = of(
        json!({ "properties": { "a": true }, "anyOf": [{ "required": ["a"] }, { "required": ["b"] }] }),
    );
    assert_eq!(members(&schema), (vec!["a", "b"], false));
    // What a condition may add is allowed.
    let schema =
        of(json!({ "properties": { "a": true }, "if": { "required": ["a"] }, "then": part("t") }));
    assert_eq!(members(&schema), (vec!["a", "t"], false));
    // A part that says that there may be more opens the whole.
    let mut open = part("a");
    open["additionalProperties"] = true.into();
    assert!(members(&of(json!({ "allOf": [open, part("b")] }))).1);
}

#[test]
fn what_the_compiler_does_not_have_is_a_remark() {
    let remarks = |schema: Value| loosen(&schema).remarks;
    let property = |schema: Value| json!({ "type": "object", "properties": { "p": schema } });
    for (schema, expected) in [
        (json!({ "type": "string", "format": "iban" }), "p: format \"iban\" is not enforced"),
        (json!({ "type": "array", "uniqueItems": true }), "p: uniqueItems is not enforced"),
        (json!({ "not": { "type": "null" } }), "p: not is not enforced"),
        (json!({ "if": {}, "then": {}, "else": {} }), "p: if is not enforced"),
        (json!({ "type": "array", "contains": {} }), "p: contains is not enforced"),
        (json!({ "type": "object", "propertyNames": {} }), "p: propertyNames is not enforced"),
        (json!({ "dependentSchemas": {} }), "p: dependentSchemas is not enforced"),
        (
            json!({ "type": "string", "pattern": "^(?=a)b" }),
            "p: pattern \"^(?=a)b\" is not enforced",
        ),
        (json!({ "patternProperties": { "(?!a)": {} } }), "p: patternProperties is not enforced"),
        (
            json!({ "patternProperties": { "a": {}, "b": {} } }),
            "p: patternProperties is not enforced",
        ),
        (json!({ "type": "money" }), "p: type \"money\" is not known, so it is not enforced"),
        (
            json!({ "$ref": "https://example.com/s.json" }),
            "p: $ref \"https://example.com/s.json\" leads nowhere, so it is not enforced",
        ),
        (
            json!({ "properties": { "a": {} }, "minProperties": 2 }),
            "p: minProperties is not enforced",
        ),
        (
            json!({ "oneOf": [{ "type": "string" }, { "minLength": 2 }] }),
            "p: oneOf: an answer may fit several of the schemas",
        ),
    ] {
        assert_eq!(remarks(property(schema)), [expected]);
    }
    for schema in [
        json!({ "type": "string", "format": "uuid", "pattern": "^[a-f]" }),
        json!({ "type": "array", "uniqueItems": false }),
        json!({ "oneOf": [{ "type": "string" }, { "type": "integer" }] }),
        json!({ "type": "object", "unevaluatedProperties": false, "x-other": 1, "maxProperties": 2 }),
        json!({ "const": { "not": 1 }, "examples": [{ "format": "x" }], "maxLength": null }),
    ] {
        assert_eq!(remarks(property(schema)), [""; 0]);
    }
    assert!(remarks(json!({ "properties": { "not": {}, "if": {}, "format": {} } })).is_empty());
    let many: Map<String, Value> = (0..99).map(|n| (n.to_string(), json!({ "not": {} }))).collect();
    assert_eq!(remarks(json!({ "properties": many })).len(), REMARKS_MAX);
}

#[test]
fn numbers_are_bounded() {
    let schema = of(json!({ "type": "integer" }));
    assert!(schema["minimum"].is_i64() && schema["maximum"].is_i64());
    let schema = of(json!({ "type": "number", "minimum": 2, "multipleOf": 0.5 }));
    assert_eq!((&schema["minimum"], &schema["multipleOf"]), (&json!(2), &json!(0.5)));
    assert!(schema["maximum"].is_i64());
    // A value of any type has bounded numbers, too.
    let schema =
        of(json!({ "type": "object", "properties": { "a": {} }, "additionalProperties": true }));
    assert_eq!(schema["properties"]["a"], schema["additionalProperties"]);
    let name = schema["properties"]["a"]["$ref"].as_str().unwrap();
    let any = schema.pointer(name.strip_prefix('#').unwrap()).unwrap();
    assert!(any["anyOf"].as_array().unwrap().iter().any(|option| option["maximum"].is_i64()));
}

/// References that repeat themselves do not make the work grow without bounds.
#[test]
fn the_work_is_bounded() {
    let mut definitions = Map::new();
    for level in 0..40 {
        let next = json!({ "$ref": format!("#/$defs/{}", level + 1) });
        let part =
            json!({ "allOf": [next, next], "anyOf": [next, next], "properties": { "a": next } });
        definitions.insert(level.to_string(), part);
    }
    definitions.insert("40".to_owned(), json!({ "$ref": "#/$defs/0" }));
    let schema = json!({ "$defs": definitions, "$ref": "#/$defs/0" });
    assert!(loosen(&schema).schema.to_string().len() < 1 << 20);
}
