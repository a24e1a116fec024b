// Translates CUDA C++ for the host's compiler.
#pragma once

#include <stdexcept>
#include <string>

namespace emulated {

// Thrown if something cannot be emulated or is missing.
struct Unknown : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Returns the text of a file.
std::string read_file(const std::string &path);

// Returns `source`, a file of the folder, as one text with all files that it includes by a name in quotation marks.
// Throws `Unknown`.
std::string translate(const std::string &folder, const std::string &source);

}  // namespace emulated
