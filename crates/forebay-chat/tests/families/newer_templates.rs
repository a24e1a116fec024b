//! Short templates of newer families, in the form of published ones.

pub const MINIMAX_M3: &str = "\
{% set at = ']<]minimax[>[' %}{% macro xml(v) %}{% if v is mapping %}{% for k, x in v.items() %}{{ at }}<{{ k }}>{{ xml(x) }}{{ at }}</{{ k }}>{% endfor %}\
{% elif v is iterable and v is not string %}{% for x in v %}{{ at }}<item>{{ xml(x) }}{{ at }}</item>{% endfor %}{% else %}{{ v }}{% endif %}{% endmacro %}\
]~!b[{% for m in messages %}{% if m.role == 'system' %}]~b]developer\n{{ m.content }}{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>{% endfor %}\
[e~[\n{% elif m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}]~b]tool{% endif %}{{ '\\n' }}\
<response>{{ m.content }}</response>{% if loop.last or loop.nextitem.role != 'tool' %}[e~[\n{% endif %}{% else %}]~b]ai\n\
{{ '<mm:think>' + m.reasoning_content if m.reasoning_content }}</mm:think>{{ m.content }}{% if m.tool_calls %}{{ at }}<tool_call>\n{% for c in m.tool_calls %}\
{{ at }}<invoke name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments.items() %}{{ at }}<{{ k }}>{{ xml(v) }}{{ at }}</{{ k }}>{% endfor %}{{ at }}</invoke>\n{% endfor %}{{ at }}</tool_call>{% endif %}[e~[\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}]~b]ai\n{{ '<mm:think>' if thinking_mode == 'enabled' else ('</mm:think>' if thinking_mode == 'disabled' else '') }}{% endif %}";

/// LFM2 lists tools and writes no calls.
pub const LFM2: &str = "\
{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<|tool_response_start|>' + m.content + '<|tool_response_end|>' if m.role == 'tool' else m.content }}\
{% if m.role == 'system' and tools %}{{ '\\n' }}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub const LFM25: &str = "\
{% macro shown(v) %}{{ \"'\" + v + \"'\" if v is string else v }}{% endmacro %}\
{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}\
{% if m.role == 'system' and tools %}{{ '\\n' }}{{ tools | tojson }}{% endif %}{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}(\
{% for k, v in c.function.arguments.items() %}{{ k }}={{ shown(v) }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}\
<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub const OLMO3: &str = "\
{% for m in messages %}<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n{{ m.content }}\
{% if m.role == 'system' %}<functions>{{ tools | tojson if tools else '' }}</functions>{% endif %}\
{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}\
{{ ', ' if not loop.last }}{% endfor %}){{ '\\n' if not loop.last }}{% endfor %}</function_calls>{% endif %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}";

pub const PHI_4_MINI: &str = "\
{% for m in messages %}{% if m.role == 'system' and m.tools is not none and m.tools %}<|system|>{{ m.content }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>\
{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Granite 3 writes roles and content only, and answers with calls behind a mark.
pub const GRANITE_3: &str = "\
{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n<|tool_call|>{% endif %}\
{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}\
{% if thinking %}<think></think><response></response>{% endif %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}";

pub const GRANITE_4: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|start_of_role|>user<|end_of_role|>{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n\
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|end_of_text|>\n{% endif %}{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}\
{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \
\"arguments\": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end_of_text|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}";

pub const NEMOTRON_3: &str = "\
{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}\
{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}<tool_response>\n{{ m.content }}\n</tool_response>{{ '\\n' }}\
{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}\
{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% if m.tool_calls %}{{ '\\n' }}{% for c in m.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n\
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\\n' if enable_thinking else '<think></think>' }}{% endif %}";

pub const NEMOTRON_2: &str = "\
{% for m in messages %}{% if m.role == 'system' %}<SPECIAL_10>System\n{{ m.content }}{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}{{ '\\n' }}\
{% elif m.role == 'user' %}<SPECIAL_11>User\n{{ m.content }}{{ '\\n' }}{% elif m.role == 'tool' %}{{ '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' if loop.previtem.role != 'tool' else ', ' }}{{ m.content }}\
{% if loop.last or loop.nextitem.role != 'tool' %}]</TOOL_RESPONSE>{% endif %}{% else %}<SPECIAL_11>Assistant\n{{ m.content }}{% if m.tool_calls %}{{ '\\n' if m.content }}<TOOLCALL>[\
{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\
{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}{{ '\\n' }}<SPECIAL_12>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant\n<think>\n{% endif %}";

pub const ERNIE: &str = "\
{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_output>\n{{ m.content }}\n</tool_output>\n{% elif m.role == 'assistant' %}\
{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{% if m.content %}<response>\n{{ m.content }}\n</response>\n{% endif %}\
{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>\n{% endfor %}\
{% else %}{{ m.content }}{% if m.role == 'system' and tools %}<tool_list>{{ tools | tojson }}</tool_list>{% endif %}{% endif %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

pub const GLM_5: &str = "\
[gMASK]<sop>{% set effort = 'high' if reasoning_effort is defined and reasoning_effort == 'high' else 'max' %}{% if tools %}<|system|>{{ effort }}{{ tools | tojson }}{% endif %}\
{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}<tool_response>{{ m.content }}</tool_response>\
{% elif m.role == 'assistant' %}<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}\
{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\
{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}";

pub const DEEPSEEK_V4: &str = "\
{% set d = '｜DSML｜' %}{% if not thinking is defined %}{% set thinking = enable_thinking is defined and enable_thinking %}{% endif %}\
{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}\
{% elif m.role == 'assistant' %}<｜Assistant｜>{{ '<think>' + (m.reasoning_content or '') if thinking }}</think>{{ m.content }}\
{% if m.tool_calls %}{{ '\\n\\n<' + d }}tool_calls>{{ '\\n' }}{% for c in m.tool_calls %}{{ '<' + d }}invoke name=\"{{ c.function.name }}\">{{ '\\n' }}\
{% for k, v in c.function.arguments.items() %}{{ '<' + d }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">\
{{ v if v is string else v | tojson }}{{ '</' + d }}parameter>{{ '\\n' }}{% endfor %}{{ '</' + d }}invoke>{{ '\\n' }}{% endfor %}{{ '</' + d }}tool_calls>{% endif %}{{ eos_token }}\
{% else %}{{ '\\n\\n' if loop.previtem and loop.previtem.role in ['user', 'tool'] else '<｜User｜>' }}{{ '<tool_result>' + m.content + '</tool_result>' if m.role == 'tool' else m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% if reasoning_effort == 'max' %}{% endif %}{% endif %}";

pub const KIMI_25: &str = "\
{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}\
<|im_{{ m.role if m.role in ['user', 'assistant'] else 'system' }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}\
<think>{{ m.reasoning_content or '' }}</think>{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}\
{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}\
<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}\
<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{{ '<think></think>' if thinking is false else '<think>' }}{% endif %}";

pub const QWEN3_NEXT: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>\
{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}\
{{ m.content }}{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n{\"name\": \
\"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

/// Ends the model's turn behind text that comes with calls.
pub const GEMMA_4_TEXT: &str = "\
{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>{% else %}\
{% if m.role != 'assistant' or loop.previtem.role == 'user' %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}\
{% if m.tool_calls %}{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>\
{% endfor %}{% else %}{{ m.content }}<turn|>\n{% endif %}{% endif %}{% if m.role == 'tool' and messages[loop.index0 - 1].content %}{{ messages[loop.index0 - 1].content }}<turn|>\n{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}";

/// Hunyuan writes calls only if there are tools.
pub const HUNYUAN: &str = "\
{% for m in messages %}{% if m.role == 'system' %}<|startoftext|>{% if tools %}<tool_calls>[{\"name\": \"func_name1\", \"arguments\": {}},...]</tool_calls>\n\
{{ tools | tojson }}{% endif %}{{ m.content }}<|extra_4|>{% elif m.role == 'user' %}{{ '用户：' if tools }}{{ m.content }}<|extra_0|>\
{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response><|extra_0|>{% elif tools and m.tool_calls %}{{ m.content }}<tool_calls>[\
{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\
{{ ', ' if not loop.last }}{% endfor %}]</tool_calls><|eos|>{% else %}{{ '助手：' if tools }}{{ m.content }}<|eos|>{% endif %}{% endfor %}\
{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}";
