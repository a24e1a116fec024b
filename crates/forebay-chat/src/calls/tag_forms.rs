//! Grammars of calls whose arguments are between tags. Texts are not quoted, other values are JSON.

use super::writer::{Form, Tool, Writer, is_text, quoted, texts};

/// Text around the parameters of a call.
struct Around {
    open: String,
    close: &'static str,
    /// Text before a value, for its name and whether it is a text.
    key: fn(&str, bool) -> String,
    /// Text behind each value.
    value_end: &'static str,
}

impl Writer<'_> {
    /// `<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>`
    pub fn function_tags(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| Around {
            open: format!("<tool_call>\n<function={name}>\n"),
            close: "</function>\n</tool_call>\n",
            key: |key, _| format!("<parameter={key}>\n"),
            value_end: "\n</parameter>\n",
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// `<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>`, or with `compact`, without line ends
    pub fn argument_tags(&self, tools: &[Tool<'_>], compact: bool) -> Form {
        let around = |name: &str| match compact {
            true => Around {
                open: format!("<tool_call>{name}"),
                close: "</tool_call>",
                key: |key, _| format!("<arg_key>{key}</arg_key><arg_value>"),
                value_end: "</arg_value>",
            },
            false => Around {
                open: format!("<tool_call>{name}\n"),
                close: "</tool_call>\n",
                key: |key, _| format!("<arg_key>{key}</arg_key>\n<arg_value>"),
                value_end: "</arg_value>\n",
            },
        };
        Form { rules: self.tagged(tools, around), ..Form::default() }
    }

    /// `<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n</minimax:tool_call>`
    pub fn minimax(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| Around {
            open: format!("<invoke name=\"{name}\">\n"),
            close: "</invoke>\n",
            key: |key, _| format!("<parameter name=\"{key}\">"),
            value_end: "</parameter>\n",
        };
        Form {
            rules: self.tagged(tools, around),
            open: "<minimax:tool_call>\n",
            close: "</minimax:tool_call>",
            ..Form::default()
        }
    }

    /// `<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>\n...`
    pub fn dsml(&self, tools: &[Tool<'_>], renamed: bool) -> Form {
        let around = |name: &str| Around {
            open: format!("<｜DSML｜invoke name=\"{name}\">\n"),
            close: "</｜DSML｜invoke>\n",
            key: |key, is_text| format!("<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">"),
            value_end: "</｜DSML｜parameter>\n",
        };
        let [open, close] = match renamed {
            true => ["<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"],
            false => ["<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"],
        };
        Form { rules: self.tagged(tools, around), open, close, ..Form::default() }
    }

    /// Returns the rules of all tools.
    fn tagged(&self, tools: &[Tool<'_>], around: impl Fn(&str) -> Around) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let around = around(tool.name);
            let (middle, rules) = self.values(number, tool, &around);
            self.rule(number, &around.open, &middle, around.close) + &rules
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// Returns the parameters of a tool in the order of its schema, and the rules that they use.
    fn values(&self, number: usize, tool: &Tool<'_>, around: &Around) -> (String, String) {
        let (mut all, mut rules) = (Vec::new(), String::new());
        let close = || self.literal(around.value_end);
        for (index, parameter) in tool.parameters().into_iter().enumerate() {
            let schema = tool.referenced(parameter.schema);
            let allowed = texts(schema).filter(|_| !self.is_full());
            let is_text = is_text(schema);
            let open = self.literal(&(around.key)(parameter.key, is_text || allowed.is_some()));
            let value = match allowed {
                Some(allowed) => {
                    let allowed: Vec<String> = allowed.into_iter().map(quoted).collect();
                    let allowed = self.counted(allowed.join(" | "));
                    format!("({allowed}) {}", close())
                }
                None if is_text => {
                    let name = format!("text{number}_{index}");
                    rules += &self.text_until(&name, around.value_end);
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
