// Cuts PTX text into tokens.
#pragma once

#include <cctype>
#include <string>
#include <vector>

namespace gpusim::ptx {

struct Token {
  enum class Kind { word, number, text, punctuation, end };
  Kind kind = Kind::end;
  std::string value;
  int line = 0;
};

// A word keeps its dots and double colons: "ld.global.L1::no_allocate.v4.b32", ".reg", "%tid.x" are one token each.
inline std::vector<Token> tokenize(const std::string& text) {
  std::vector<Token> tokens;
  int line = 1;
  std::size_t i = 0;
  const std::size_t n = text.size();
  const auto in_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
  };
  while (i < n && text[i] != '\0') {
    const char c = text[i];
    if (c == '\n') {
      ++line;
      ++i;
      continue;
    }
    if (std::isspace(static_cast<unsigned char>(c))) {
      ++i;
      continue;
    }
    if (c == '/' && i + 1 < n && text[i + 1] == '/') {
      while (i < n && text[i] != '\n') ++i;
      continue;
    }
    if (c == '/' && i + 1 < n && text[i + 1] == '*') {
      for (i += 2; i + 1 < n && !(text[i] == '*' && text[i + 1] == '/'); ++i) line += text[i] == '\n';
      i += 2;
      continue;
    }
    const std::size_t begin = i;
    if (c == '"') {
      for (++i; i < n && text[i] != '"'; ++i) {
      }
      tokens.push_back({Token::Kind::text, text.substr(begin + 1, i - begin - 1), line});
      ++i;
    } else if (std::isdigit(static_cast<unsigned char>(c))) {
      while (i < n && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '.')) ++i;
      tokens.push_back({Token::Kind::number, text.substr(begin, i - begin), line});
    } else if (in_word(c)) {
      while (i < n) {
        if (in_word(text[i]))
          ++i;
        else if (text[i] == ':' && i + 2 < n && text[i + 1] == ':' && in_word(text[i + 2]))
          i += 2;
        else
          break;
      }
      tokens.push_back({Token::Kind::word, text.substr(begin, i - begin), line});
    } else {
      tokens.push_back({Token::Kind::punctuation, std::string(1, c), line});
      ++i;
    }
  }
  tokens.push_back({Token::Kind::end, "", line});
  return tokens;
}

}  // namespace gpusim::ptx
