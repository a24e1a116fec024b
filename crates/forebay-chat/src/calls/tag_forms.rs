//! Grammars of calls whose arguments are between tags. Texts are not quoted, other values are JSON.

use serde_json::Value;

use super::writer::{Form, Tool, Writer, is_text, quoted, texts};
use crate::{DsmlNames, SuffixedMarks};

/// Returns the text before a value, for its name and the kind of its type.
type KeyText = Box<dyn Fn(&str, &str) -> String>;

/// Text around the parameters of a call.
struct Around {
    open: String,
    close: String,
    key: KeyText,
    /// Text behind each value.
    value_end: String,
}

impl Around {
    fn new(open: String, close: &str, key: impl Fn(&str) -> String + 'static, end: &str) -> Around {
        Around::typed(open, close, move |name, _| key(name), end)
    }

    fn typed(
        open: String,
        close: &str,
        key: impl Fn(&str, &str) -> String + 'static,
        end: &str,
    ) -> Around {
        Around { open, close: close.to_owned(), key: Box::new(key), value_end: end.to_owned() }
    }
}

impl Writer<'_> {
    /// `<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>`
    pub fn function_tags(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| {
            let open = format!("<tool_call>\n<function={name}>\n");
            let key = |key: &str| format!("<parameter={key}>\n");
            Around::new(open, "</function>\n</tool_call>\n", key, "\n</parameter>\n")
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// `<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n</function>\n</seed:tool_call>`
    pub fn seed(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| {
            let open = format!("<seed:tool_call>\n<function={name}>\n");
            let key = |key: &str| format!("<parameter={key}>");
            Around::new(open, "</function>\n</seed:tool_call>\n", key, "</parameter>\n")
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// `<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>`, or with `compact`, without line ends
    pub fn argument_tags(&self, tools: &[Tool<'_>], compact: bool) -> Form {
        let end = if compact { "" } else { "\n" };
        let around = |name: &str| {
            let key = move |key: &str| format!("<arg_key>{key}</arg_key>{end}<arg_value>");
            let [close, value_end] = [format!("</tool_call>{end}"), format!("</arg_value>{end}")];
            Around::new(format!("<tool_call>{name}{end}"), &close, key, &value_end)
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// The same with a suffix in each mark, and with marks around all calls
    pub fn suffixed(&self, tools: &[Tool<'_>], marks: &'static SuffixedMarks) -> Form {
        let [call, call_end] = marks.call;
        let ([key, key_end], [value, value_end]) = (marks.arguments.key, marks.arguments.value);
        let (separator, end) = match marks.separated {
            true => (marks.arguments.behind_name, "\n"),
            false => ("", ""),
        };
        let around = |name: &str| {
            let key = move |name: &str| format!("{key}{name}{key_end}{end}{value}");
            let [close, value_end] = [format!("{call_end}{end}"), format!("{value_end}{end}")];
            Around::new(format!("{call}{name}{separator}{end}"), &close, key, &value_end)
        };
        let [open, close] = marks.around;
        Form { rules: self.tagged(tools, around), open, close, ..Form::default() }
    }

    /// `<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n` between two marks
    pub fn invokes(&self, tools: &[Tool<'_>], [open, close]: [&'static str; 2]) -> Form {
        let around = |name: &str| {
            let open = format!("<invoke name=\"{name}\">\n");
            let key = |key: &str| format!("<parameter name=\"{key}\">");
            Around::new(open, "</invoke>\n", key, "</parameter>\n")
        };
        Form { rules: self.tagged(tools, around), open, close, ..Form::default() }
    }

    /// `<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter
    /// name="k">v</atem:parameter>\n</atem:invoke>\n...`
    pub fn atem(&self, tools: &[Tool<'_>]) -> Form {
        Form {
            rules: self.tagged(tools, |name| atem(name, "", "")),
            open: "<atem:function_calls>\n",
            close: "</atem:function_calls>",
            ..Form::default()
        }
    }

    /// `<|start|>assistant to=f<|message|><atem:function_calls>\n...\n</atem:function_calls><|eot|>`
    pub fn muse(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| {
            let open = format!("<|start|>assistant to={name}<|message|><atem:function_calls>\n");
            atem(name, &open, "</atem:function_calls>")
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// `<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k"
    /// type="string"<|sep|>v<|close|>argument<|sep|>...`
    pub fn kimi3(&self, tools: &[Tool<'_>]) -> Form {
        let escaped = |text: &str| text.replace('&', "&amp;").replace('"', "&quot;");
        let around = |name: &str| {
            // The number follows in a rule of its own.
            let open = format!("<|open|>call tool=\"{}\" index=\"", escaped(name));
            let key = move |key: &str, kind: &str| {
                format!("<|open|>argument key=\"{}\" type=\"{kind}\"<|sep|>", escaped(key))
            };
            Around::typed(open, "<|close|>call<|sep|>", key, "<|close|>argument<|sep|>")
        };
        let number = format!("call_number {}", self.literal("\"<|sep|>"));
        let rule = |(index, tool): (usize, &Tool<'_>)| {
            let around = around(tool.name);
            let (values, rules) = self.values(index, tool, &around);
            self.rule(index, &around.open, &format!("{number} {values}"), &around.close) + &rules
        };
        let rules: String = tools.iter().enumerate().map(rule).collect();
        Form {
            rules: rules + "call_number: /[0-9]{1,4}/\n",
            open: "<|open|>tools<|sep|>",
            close: "<|close|>tools<|sep|>",
            ..Form::default()
        }
    }

    /// `<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>\n...`
    pub fn dsml(&self, tools: &[Tool<'_>], names: DsmlNames) -> Form {
        let [open_tag, close_tag] = names.tags();
        let around = |name: &str| {
            let open = format!("{open_tag}invoke name=\"{name}\">\n");
            let key = move |key: &str, kind: &str| {
                format!("{open_tag}parameter name=\"{key}\" string=\"{}\">", kind == "string")
            };
            let [close, end] = ["invoke", "parameter"].map(|tag| format!("{close_tag}{tag}>\n"));
            Around::typed(open, &close, key, &end)
        };
        let open = match names {
            DsmlNames::V32 => "<｜DSML｜function_calls>\n",
            DsmlNames::V4 => "<｜DSML｜tool_calls>\n",
            DsmlNames::V41 => "<｜DSML｜ calls>\n",
        };
        Form { rules: self.tagged(tools, around), open, close: names.block()[1], ..Form::default() }
    }

    /// Returns the rules of all tools.
    fn tagged(&self, tools: &[Tool<'_>], around: impl Fn(&str) -> Around) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let around = around(tool.name);
            let (middle, rules) = self.values(number, tool, &around);
            self.rule(number, &around.open, &middle, &around.close) + &rules
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// Returns the parameters of a tool in the order of its schema, and the rules that they use.
    fn values(&self, number: usize, tool: &Tool<'_>, around: &Around) -> (String, String) {
        let (mut all, mut rules) = (Vec::new(), String::new());
        let close = || self.literal(&around.value_end);
        for (index, parameter) in tool.parameters().into_iter().enumerate() {
            let schema = tool.referenced(parameter.schema);
            let allowed = texts(schema).filter(|_| !self.is_full());
            let is_text = is_text(schema);
            let kind = match is_text || allowed.is_some() {
                true => "string",
                false => kind_of(schema),
            };
            let open = self.literal(&(around.key)(parameter.key, kind));
            let value = match allowed {
                Some(allowed) => {
                    let allowed: Vec<String> = allowed.into_iter().map(quoted).collect();
                    let allowed = self.counted(allowed.join(" | "));
                    format!("({allowed}) {}", close())
                }
                None if is_text => {
                    let name = format!("text{number}_{index}");
                    rules += &self.text_until(&name, &around.value_end);
                    name
                }
                None => format!("{} {}", self.inline(tool, parameter.schema), close()),
            };
            let optional = if parameter.is_required { "" } else { "?" };
            all.push(format!("parameter{number}_{index}{optional}"));
            rules += &format!("parameter{number}_{index}: {open} {value}\n");
        }
        (all.join(" "), rules)
    }
}

/// Returns the text around the parameters of a call of Muse, with more text before and behind it.
fn atem(name: &str, before: &str, behind: &str) -> Around {
    let open = format!("{before}<atem:invoke name=\"{name}\">\n");
    let key = |key: &str| format!("<atem:parameter name=\"{key}\">");
    Around::new(open, &format!("</atem:invoke>\n{behind}"), key, "</atem:parameter>\n")
}

/// Returns the name that Kimi K3 has for the type of a value. Numbers have one name.
fn kind_of(schema: &Value) -> &str {
    match schema.get("type").and_then(Value::as_str) {
        Some("integer") => "number",
        Some(kind) => kind,
        None => "object",
    }
}
