//! Grammar of calls of Gemma 4 and FunctionGemma: `call:f{key:value,...}`.

use serde_json::Value;

use super::writer::{
    DEPTH_MAX, Form, Parameter, Tool, Writer, is_text, parameters, sequence, texts,
};

impl Writer<'_> {
    /// `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`. `marks` are around the call, `quote` is around texts.
    pub fn gemma(&self, tools: &[Tool<'_>], marks: [&'static str; 2], quote: &str) -> Form {
        let [open, close] = marks;
        let mut rules = String::new();
        for (number, tool) in tools.iter().enumerate() {
            let name = format!("arguments{number}");
            let prefix = format!("value{number}_");
            let mut values =
                Values { writer: self, tool, quote, prefix, rules: String::new(), count: 0 };
            values.object(&name, &tool.schema, 0);
            rules += &self.rule(
                number,
                &format!("{open}call:{}{{", tool.name),
                &name,
                &format!("}}{close}"),
            );
            rules += &values.rules;
        }
        let quote_part = self.literal(quote);
        rules += &self.text_until("any_text", quote);
        rules += "space: \"\"\n";
        rules += "any_number: /-?[0-9]+(\\.[0-9]+)?/\n";
        rules += "any_member: /[A-Za-z_][A-Za-z0-9_]*/ \":\" any_value\n";
        rules += "any_list: \"[\" (any_value (\",\" any_value)*)? \"]\"\n";
        rules += "any_object: \"{\" (any_member (\",\" any_member)*)? \"}\"\n";
        rules += &format!(
            "any_value: {quote_part} any_text | any_number | \"true\" | \"false\" | \"null\" | any_list | any_object\n"
        );
        Form { rules, ..Form::default() }
    }
}

/// Rules of the values of a tool's arguments.
struct Values<'a> {
    writer: &'a Writer<'a>,
    tool: &'a Tool<'a>,
    quote: &'a str,
    /// Prefix of the names of the rules.
    prefix: String,
    rules: String,
    count: usize,
}

impl Values<'_> {
    /// Adds the rule `name` of an object's members. The templates sort them by name.
    fn object(&mut self, name: &str, schema: &Value, depth: usize) {
        let mut members: Vec<Parameter<'_>> = parameters(schema);
        members.sort_by_key(|member| member.key.to_lowercase());
        let mut items = Vec::new();
        for member in members {
            let value = self.value(member.schema, depth + 1);
            let key = self.writer.literal(&format!("{}:", member.key));
            items.push((format!("{key} {value}"), member.is_required));
        }
        self.rules += &sequence(name, &items);
    }

    /// Adds a rule, and returns its name.
    fn named(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("{}{}", self.prefix, self.count);
        self.rules += &format!("{name}: {body}\n");
        name
    }

    /// Returns a value as a part of a rule. Beyond the bounds, a value is of any type.
    fn value(&mut self, schema: &Value, depth: usize) -> String {
        let (writer, tool, quote) = (self.writer, self.tool, self.quote);
        if depth > DEPTH_MAX || writer.is_full() {
            return "any_value".to_owned();
        }
        if let Some(texts) = texts(schema) {
            let texts = texts.into_iter().map(|text| format!("{quote}{text}{quote}"));
            let texts: Vec<String> = texts.map(|text| writer.literal(&text)).collect();
            return format!("({})", texts.join(" | "));
        }
        if is_text(schema) {
            return format!("{} any_text", writer.literal(quote));
        }
        if schema.get("$ref").is_some_and(Value::is_string) {
            return match tool.target(schema) {
                Some(target) => self.value(target, depth + 1),
                None => "any_value".to_owned(),
            };
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("integer" | "number" | "boolean" | "null") => writer.inline(tool, schema),
            Some("array") => {
                let item = match schema.get("items").filter(|items| items.is_object()) {
                    Some(items) => {
                        let item = self.value(items, depth + 1);
                        // The item is there twice, and may be a list in its turn.
                        self.named(&item)
                    }
                    None => "any_value".to_owned(),
                };
                format!("\"[\" ({item} (\",\" {item})*)? \"]\"")
            }
            Some("object") if schema.get("properties").is_some() => {
                self.count += 1;
                let name = format!("{}{}", self.prefix, self.count);
                self.object(&name, schema, depth);
                format!("\"{{\" {name} \"}}\"")
            }
            Some("object") => "any_object".to_owned(),
            _ => "any_value".to_owned(),
        }
    }
}
