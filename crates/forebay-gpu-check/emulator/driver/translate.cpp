// With the shims in `device`, the kernels are ordinary C++, apart from two things that macros cannot replace: inline
// PTX, and arrays of dynamic shared memory, whose declarations have no address.
#include "translate.h"

#include <ctype.h>

#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <vector>

namespace emulated {

namespace {

// Maps inline PTX without white space to the function of `ptx.h` that does the same.
const std::map<std::string, std::string> STATEMENTS = {
    {"", "hidden"},
    {"//90:griddepcontrol.wait;", "nothing"},
    {"//90:griddepcontrol.launch_dependents;", "nothing"},
    {"cvt.f32.f16%0,%1;", "cvt_f32_f16"},
    {"cvt.rn.f16x2.f32%0,%1,%2;", "cvt_f16x2_f32"},
    {"{.reg.b16h;cvt.rn.bf16.f32h,%1;mov.b32%0,{h,h};}", "cvt_bf16_f32_twice"},
    {"{.reg.u32zero;mov.u32zero,%%laneid;shr.u32zero,zero,5;add.u32%0,zero,0x03020100;}", "hidden_03020100"},
    {"ex2.approx.ftz.f32%0,%1;", "ex2_approx_ftz"},
    {"prmt.b32%0,%1,%2,%3;", "prmt"},
    {"ld.global.v4.u32{%0,%1,%2,%3},[%4];", "ld_v4"},
    {"ld.shared.v4.f32{%0,%1,%2,%3},[%4];", "ld_shared_v4"},
    {"ld.shared.v2.f32{%0,%1},[%2];", "ld_shared_v2"},
    {"ld.global.v2.u32{%0,%1},[%2];", "ld_v2"},
    {"ld.global.u32%0,[%1];", "ld_u32"},
    {"ld.global.cs.v2.u32{%0,%1},[%2];", "ld_v2"},
    {"ld.global.cs.u32%0,[%1];", "ld_u32"},
    {"ld.global.u16%0,[%1];", "ld_u16"},
    {"prefetch.global.L2[%0];", "prefetch"},
    {"ld.acquire.sys.global.u32%0,[%1];", "ld_acquire_sys"},
    {"ld.acquire.gpu.global.u32%0,[%1];", "ld_acquire_gpu"},
    {"st.release.sys.global.u32[%0],%1;", "st_release_sys"},
    {"mov.u64%0,%%globaltimer;", "nanoseconds"},
    {"cp.async.cg.shared.global.L2::128B[%0],[%1],16;", "cp_async"},
    {"cp.async.cg.shared.global[%0],[%1],16,%2;", "cp_async_zero"},
    {"cp.async.ca.shared.global[%0],[%1],4;", "cp_async_4"},
    {"cp.async.commit_group;", "cp_async_commit"},
    {"cp.async.wait_group%0;", "cp_async_wait"},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16{%0,%1,%2,%3},[%4];", "ldmatrix"},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16{%0,%1,%2,%3},[%4];", "ldmatrix_transposed"},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};", "mma_f16"},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};",
     "mma_bf16"},
    {"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};", "mma_s8"},
    {"mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32{%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};", "mma_s8_half"},
};

bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

// Returns the end of the string (with its quotes) or comment that begins at `i`, or `i` itself if code begins there.
size_t skip(const std::string &text, size_t i) {
    if (text.compare(i, 2, "//") == 0) return std::min(text.find('\n', i), text.size());
    if (text.compare(i, 2, "/*") == 0) return std::min(text.find("*/", i), text.size() - 2) + 2;
    if (text[i] != '"' && text[i] != '\'') return i;
    // A digit separator, as in 1'000.
    if (text[i] == '\'' && i > 0 && isalnum((unsigned char)text[i - 1])) return i;
    size_t end = i + 1;
    while (end < text.size() && text[end] != text[i]) end += text[end] == '\\' ? 2 : 1;
    return std::min(end + 1, text.size());
}

// Splits `text` at every `mark` that is not in a string, comment or bracket.
std::vector<std::string> split(const std::string &text, char mark) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (size_t i = 0; i < text.size();) {
        const size_t end = skip(text, i);
        if (end > i) {
            parts.back() += text.substr(i, end - i);
            i = end;
            continue;
        }
        depth += text[i] == '(' || text[i] == '[';
        depth -= text[i] == ')' || text[i] == ']';
        if (text[i] == mark && depth == 0)
            parts.emplace_back();
        else
            parts.back() += text[i];
        i++;
    }
    return parts;
}

bool is_blank(const std::string &text) { return text.find_first_not_of(" \t\r\n\\") == std::string::npos; }

// Joins the adjacent strings of `text` and removes white space.
std::string statement_of(const std::string &text) {
    std::string out;
    bool inside = false;
    for (char c : text) {
        if (c == '"') inside = !inside;
        else if (inside && !isspace((unsigned char)c)) out += c;
    }
    return out;
}

// Returns `"=r"(x)` without the part before the bracket.
std::string operand_of(const std::string &text) {
    const size_t first = text.find('"'), last = text.find('"', first + 1);
    const size_t open = text.find('(', last), close = text.rfind(')');
    if (last == std::string::npos || open == std::string::npos || close == std::string::npos)
        throw Unknown("inline PTX with the operand `" + text + "`");
    return text.substr(open, close + 1 - open);
}

// Turns the text between the brackets of an `asm` into a call.
std::string call_of(const std::string &text) {
    const std::vector<std::string> parts = split(text, ':');
    const std::string statement = statement_of(parts[0]);
    const auto found = STATEMENTS.find(statement);
    if (found == STATEMENTS.end()) throw Unknown("inline PTX that is not emulated: " + statement);
    std::string arguments;
    for (size_t part = 1; part < parts.size() && part < 3; part++) {
        if (is_blank(parts[part])) continue;
        for (const std::string &operand : split(parts[part], ','))
            arguments += (arguments.empty() ? "" : ", ") + operand_of(operand);
    }
    return "ptx::" + found->second + "(" + arguments + ")";
}

std::string without_inline_ptx(const std::string &text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        size_t end = skip(text, i);
        if (end > i) {
            out += text.substr(i, end - i);
            i = end;
            continue;
        }
        const bool begins = i == 0 || !is_word(text[i - 1]);
        if (!begins || text.compare(i, 3, "asm") != 0 || is_word(text[i + 3])) {
            out += text[i++];
            continue;
        }
        const size_t open = text.find('(', i);
        int depth = 1;
        for (end = open + 1; end < text.size() && depth > 0;) {
            const size_t past = skip(text, end);
            if (past > end) {
                end = past;
                continue;
            }
            depth += text[end] == '(';
            depth -= text[end] == ')';
            end++;
        }
        const std::string lines(std::count(text.begin() + (ptrdiff_t)i, text.begin() + (ptrdiff_t)end, '\n'), '\n');
        out += call_of(text.substr(open + 1, end - open - 2)) + lines;
        i = end;
    }
    return out;
}

std::string with_dynamic_memory(const std::string &text) {
    static const std::regex declaration(R"(extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];)");
    return std::regex_replace(text, declaration, "$1 *const $2 = ($1 *)emulated::device->dynamic_shared;");
}

void append(std::string &out, const std::string &folder, const std::string &file, std::set<std::string> &seen) {
    if (!seen.insert(file).second) return;
    std::istringstream lines(with_dynamic_memory(without_inline_ptx(read_file(folder + "/" + file))));
    out += "#line 1 \"" + file + "\"\n";
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        const std::string include = "#include \"";
        if (line.compare(0, include.size(), include) == 0) {
            append(out, folder, line.substr(include.size(), line.rfind('"') - include.size()), seen);
            out += "#line " + std::to_string(number + 1) + " \"" + file + "\"\n";
        } else if (line != "#pragma once") {
            out += line + "\n";
        }
    }
}

}  // namespace

std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Unknown("cannot read " + path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

std::string translate(const std::string &folder, const std::string &source) {
    std::string out;
    std::set<std::string> seen;
    append(out, folder, source, seen);
    return out;
}

}  // namespace emulated
