//! The latest families.

use super::Family;

pub const MARKS: [&str; 36] = [
    "<seed:think>",
    "</seed:think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<think:x>",
    "</think:x>",
    "<tool_calls:x>",
    "</tool_calls:x>",
    "<tool_call:x>",
    "</tool_call:x>",
    "<tool_sep:x>",
    "<arg_key:x>",
    "</arg_key:x>",
    "<arg_value:x>",
    "</arg_value:x>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|begin|>",
    "<|think|>",
    "<|content|>",
    "<|tool_calls|>",
    "<|calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    "<|eom|>",
    "<|eot|>",
    "<dots_function_call>",
];

pub const FAMILIES: [Family; 10] = [
    Family {
        template: "<seed:think><seed:tool_call>",
        prompt: "<seed:bos>assistant\n",
        before: "<seed:think>thoughts</seed:think>",
        forecast: "<seed:tool_call>\n<function=forecast>\n<parameter=city>CITY</parameter>\n<parameter=days>3</parameter>\n\
                  </function>\n</seed:tool_call>\n",
        stop: "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>\n",
        around: ["", ""],
        between: "",
        several: true,
    },
    Family {
        template: HY,
        prompt: "<think:x>",
        before: "thoughts</think:x>",
        forecast: "<tool_call:x>forecast<tool_sep:x>\n<arg_key:x>city</arg_key:x>\n<arg_value:x>CITY</arg_value:x>\n\
                  <arg_key:x>days</arg_key:x>\n<arg_value:x>3</arg_value:x>\n</tool_call:x>\n",
        stop: "<tool_call:x>stop<tool_sep:x>\n</tool_call:x>\n",
        around: ["<tool_calls:x>\n", "</tool_calls:x>"],
        between: "",
        several: true,
    },
    Family {
        template: HY_COMPACT,
        prompt: "<think:x></think:x>",
        before: "",
        forecast: "<tool_call:x>forecast<arg_key:x>city</arg_key:x><arg_value:x>CITY</arg_value:x>\
                  <arg_key:x>days</arg_key:x><arg_value:x>3</arg_value:x></tool_call:x>",
        stop: "<tool_call:x>stop</tool_call:x>",
        around: ["<tool_calls:x>", "</tool_calls:x>"],
        between: "",
        several: true,
    },
    Family {
        template: "<|START_THINKING|><|START_TEXT|><|START_ACTION|>",
        prompt: "<|CHATBOT_TOKEN|><|START_THINKING|>",
        before: "thoughts<|END_THINKING|>",
        forecast: "\n    {\"tool_call_id\": \"0\", \"tool_name\": \"forecast\", \"parameters\": {\"city\": \"CITY\", \"days\": 3}}",
        stop: "\n    {\"tool_call_id\": \"1\", \"tool_name\": \"stop\", \"parameters\": {}}",
        around: ["<|START_ACTION|>[", "\n]<|END_ACTION|>"],
        between: ",",
        several: true,
    },
    Family {
        template: "<|open|><|close|><|sep|><|end_of_msg|>",
        prompt: "<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>",
        before: "thoughts<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>",
        forecast: "<|open|>call tool=\"forecast\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>CITY<|close|>argument<|sep|>\
                  <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>",
        stop: "<|open|>call tool=\"stop\" index=\"2\"<|sep|><|close|>call<|sep|>",
        around: ["<|open|>tools<|sep|>", "<|close|>tools<|sep|>"],
        between: "",
        several: true,
    },
    Family {
        template: "<|open|><|close|><|sep|><|end_of_msg|>",
        prompt: "<|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>",
        before: "I look.<|close|>response<|sep|>",
        forecast: "<|open|>call tool=\"forecast\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>CITY<|close|>argument<|sep|>\
                  <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>",
        stop: "<|open|>call tool=\"stop\" index=\"2\"<|sep|><|close|>call<|sep|>",
        around: ["<|open|>tools<|sep|>", "<|close|>tools<|sep|>"],
        between: "",
        several: true,
    },
    Family {
        template: "<|think|><|tool_call:begin|>",
        prompt: "<|begin|>assistant",
        before: "<|think|>thoughts<|end|><|begin|>assistant",
        forecast: "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>forecast<|tool_call:args|>{\"city\": \"CITY\", \"days\": 3}<|tool_call:end|>",
        stop: "<|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>stop<|tool_call:args|>{}<|tool_call:end|>",
        around: ["<|tool_calls|>", "<|calls|>"],
        between: "",
        several: true,
    },
    Family {
        template: "<atem:function_calls><|eom|>",
        prompt: "<|start|>assistant",
        before: " to=self<|message|>thoughts<|eom|>",
        forecast: "<|start|>assistant to=forecast<|message|><atem:function_calls>\n<atem:invoke name=\"forecast\">\n\
                  <atem:parameter name=\"city\">CITY</atem:parameter>\n<atem:parameter name=\"days\">3</atem:parameter>\n\
                  </atem:invoke>\n</atem:function_calls>",
        stop: "<|start|>assistant to=stop<|message|><atem:function_calls>\n<atem:invoke name=\"stop\">\n</atem:invoke>\n</atem:function_calls>",
        around: ["", ""],
        between: "",
        several: false,
    },
    Family {
        template: "<dots_function_call>",
        prompt: "<|response|>",
        before: "",
        forecast: "<invoke name=\"forecast\">\n<parameter name=\"city\">CITY</parameter>\n\
                  <parameter name=\"days\">3</parameter>\n</invoke>\n",
        stop: "<invoke name=\"stop\">\n</invoke>\n",
        around: ["<dots_function_call>\n", "</dots_function_call>"],
        between: "",
        several: true,
    },
    Family {
        template: "｜DSML｜ calls invoke name=",
        prompt: "<｜Assistant｜>",
        before: "",
        forecast: "<｜DSML｜ invoke name=\"forecast\">\n<｜DSML｜ parameter name=\"city\" string=\"true\">CITY</｜DSML｜ parameter>\n\
                  <｜DSML｜ parameter name=\"days\" string=\"false\">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n",
        stop: "<｜DSML｜ invoke name=\"stop\">\n</｜DSML｜ invoke>\n",
        around: ["<｜DSML｜ calls>\n", "</｜DSML｜ calls>"],
        between: "",
        several: true,
    },
];

/// A template with the marks of Hy3, with the suffix `:x`.
const HY: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_calls:x>\n<tool_call:x>{{ c.function.name }}<tool_sep:x>\n\
                  {% for k, v in c.function.arguments | items %}<arg_key:x>{{ k }}</arg_key:x>\n<arg_value:x>{{ v }}</arg_value:x>\n\
                  {% endfor %}</tool_call:x>\n</tool_calls:x>{% endfor %}{% endfor %}";

/// The same for Hy4.
const HY_COMPACT: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_calls:x><tool_call:x>{{ c.function.name }}\
                          {% for k, v in c.function.arguments | items %}<arg_key:x>{{ k }}</arg_key:x><arg_value:x>{{ v }}</arg_value:x>\
                          {% endfor %}</tool_call:x></tool_calls:x>{% endfor %}{% endfor %}";
