// CUDA C++ into what the host's compiler reads.
#pragma once

#include <stdexcept>
#include <string>

namespace emulated {

// What cannot be emulated, or is not there.
struct Unknown : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The text of a file.
std::string read_file(const std::string &path);

// `source` of the folder with all that it includes by a name in quotation marks, as one text. Throws `Unknown`.
std::string translate(const std::string &folder, const std::string &source);

}  // namespace emulated
