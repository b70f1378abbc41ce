// Tokens -> Module. Knows the shape of the language, not the meaning of any instruction.
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>

#include "ptx_ast.h"
#include "ptx_lexer.h"

namespace gpusim::ptx {

int bytes_of_type(const std::string& type) {
  static const std::map<std::string, int> sizes = {
      {"pred", 4}, {"b8", 1},  {"u8", 1},  {"s8", 1},  {"b16", 2},   {"u16", 2},    {"s16", 2},   {"f16", 2},
      {"bf16", 2}, {"b32", 4}, {"u32", 4}, {"s32", 4}, {"f32", 4},   {"f16x2", 4},  {"tf32", 4},  {"bf16x2", 4},
      {"b64", 8},  {"u64", 8}, {"s64", 8}, {"f64", 8}, {"b128", 16}, {"e4m3x2", 2}, {"e5m2x2", 2}};
  const auto found = sizes.find(type);
  return found == sizes.end() ? 0 : found->second;
}

namespace {

bool starts_with(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

std::vector<std::string> split_dots(const std::string& word) {
  std::vector<std::string> parts;
  std::stringstream stream(word);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  return parts;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : tokens_(tokenize(text)) {
    std::stringstream stream(text);
    for (std::string line; std::getline(stream, line);) module_.lines.push_back(line);
  }

  Module run() {
    while (peek().kind != Token::Kind::end) top_level();
    return std::move(module_);
  }

 private:
  const Token& peek(int ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  Token next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is(const char* value) const { return peek().value == value && peek().kind != Token::Kind::text; }
  bool accept(const char* value) {
    if (!is(value)) return false;
    next();
    return true;
  }
  void expect(const char* value) {
    if (!accept(value)) fail(std::string("expected '") + value + "', found '" + peek().value + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(peek().line) + ": " + what);
  }
  void skip_line() {
    for (const int line = peek().line; peek().line == line && peek().kind != Token::Kind::end;) next();
  }
  void skip_to(const char* value) {
    while (!is(value) && peek().kind != Token::Kind::end) next();
    accept(value);
  }

  std::uint64_t integer() {
    const bool negative = accept("-");
    const Token token = next();
    if (token.kind != Token::Kind::number) fail("expected a number, found '" + token.value + "'");
    std::string digits = token.value;
    while (!digits.empty() && (digits.back() == 'U' || digits.back() == 'u')) digits.pop_back();
    const int base = starts_with(digits, "0x") || starts_with(digits, "0X") ? 16
                     : digits.size() > 1 && digits[0] == '0'                ? 8
                                                                            : 10;
    const std::uint64_t value = std::stoull(digits, nullptr, base);
    return negative ? 0 - value : value;
  }

  // module level ------------------------------------------------------------------------------------------------

  void top_level() {
    if (peek().kind != Token::Kind::word) fail("unexpected '" + peek().value + "'");
    const std::string word = peek().value;
    if (word == ".version" || word == ".address_size") return skip_line();
    if (word == ".target") {
      next();
      module_.target = peek().value;
      return skip_line();
    }
    if (word == ".file") return file();
    if (word == ".loc") return loc();
    if (word == ".section") {
      next();
      skip_to("{");
      return skip_to("}");
    }
    if (word == ".pragma" || word == ".alias") return skip_to(";");
    bool external = false;
    while (is(".visible") || is(".extern") || is(".weak") || is(".common")) external |= next().value == ".extern";
    if (accept(".entry")) return function(true);
    if (accept(".func")) return function(false);
    Variable first = variable();
    first.external = external;
    module_.variables.push_back(std::move(first));
    while (accept(",")) {
      Variable more = module_.variables.back();
      declarator(more);
      module_.variables.push_back(std::move(more));
    }
    expect(";");
  }

  void file() {
    next();
    const int index = static_cast<int>(integer());
    module_.files[index] = next().value;
    for (const int line = peek(-1).line; peek().line == line && peek().kind != Token::Kind::end;) next();
  }

  // .loc file line column [, function_name label, inlined_at file line column]
  void loc() {
    const int line = peek().line;
    next();
    source_ = SourceLine{};
    source_.file = static_cast<int>(integer());
    source_.line = static_cast<int>(integer());
    while (peek().line == line && peek().kind != Token::Kind::end) {
      if (next().value != "inlined_at") continue;
      source_.caller_file = static_cast<int>(integer());
      source_.caller_line = static_cast<int>(integer());
    }
  }

  // .space .align n .type name[size] = {...}
  Variable variable() {
    Variable v;
    v.space = next().value.substr(1);
    while (peek().kind == Token::Kind::word && peek().value[0] == '.') {
      const std::string word = next().value;
      if (word == ".align") {
        v.align = static_cast<int>(integer());
      } else if (word == ".attribute") {
        skip_to(")");
      } else if (word == ".v2" || word == ".v4") {
        v.elements *= word[2] - '0';
      } else if (bytes_of_type(word.substr(1)) > 0) {
        v.type = word.substr(1);
      } else if (word == ".ptr" || word == ".global" || word == ".shared" || word == ".const" || word == ".local" ||
                 word == ".param" || word == ".generic" || word == ".managed") {
        // says what a pointer parameter points to; nothing to keep
      } else {
        fail("unknown attribute '" + word + "' of a variable");
      }
    }
    declarator(v);
    return v;
  }

  void declarator(Variable& v) {
    v.name = next().value;
    v.count = 0;
    v.initial.clear();
    if (accept("<")) {
      v.count = static_cast<int>(integer());
      expect(">");
    }
    while (accept("[")) {
      v.elements *= is("]") ? 0 : integer();
      expect("]");
    }
    if (v.align == 0) v.align = bytes_of_type(v.type);
    if (accept("=")) initializer(v);
  }

  void initializer(Variable& v) {
    if (accept("{")) {
      while (!accept("}")) {
        initializer(v);
        accept(",");
      }
      return;
    }
    Variable::Initial value;
    if (peek().kind == Token::Kind::number || is("-")) {
      const Operand number = operand();
      value.bits = number.bits;
    } else {
      value.symbol = next().value;
      if (value.symbol == "generic" && accept("(")) {
        value.symbol = next().value;
        expect(")");
      }
      if (accept("+")) value.bits = integer();
    }
    v.initial.push_back(value);
  }

  std::vector<Variable> parameter_list() {
    std::vector<Variable> list;
    expect("(");
    while (!accept(")")) {
      list.push_back(variable());
      accept(",");
    }
    return list;
  }

  void function(bool entry) {
    Function f;
    f.entry = entry;
    f.line = peek().line;
    if (is("(")) f.results = parameter_list();
    f.name = next().value;
    if (is("(")) f.params = parameter_list();
    while (!is("{") && !is(";")) {
      if (is(".pragma")) {
        skip_to(";");
        continue;
      }
      const std::string word = next().value;
      auto& values = f.directives[word.substr(word[0] == '.')];
      while (peek().kind == Token::Kind::number) {
        values.push_back(integer());
        accept(",");
      }
    }
    if (!accept(";")) {
      f.defined = true;
      body(f.body);
    }
    module_.functions.push_back(std::move(f));
  }

  // function bodies ---------------------------------------------------------------------------------------------

  void body(std::vector<Statement>& out) {
    expect("{");
    for (int depth = 1; depth > 0;) {
      if (peek().kind == Token::Kind::end) fail("a function does not end");
      if (is(".loc")) {
        loc();
        continue;
      }
      if (is(".pragma") || is(".alias")) {
        skip_to(";");
        continue;
      }
      if (accept(";")) continue;
      Statement s;
      s.line = peek().line;
      s.source = source_;
      if (accept("{")) {
        ++depth;
        s.kind = Statement::Kind::open;
      } else if (accept("}")) {
        --depth;
        s.kind = Statement::Kind::close;
        if (depth == 0) break;
      } else if (peek().kind == Token::Kind::word && peek().value[0] == '.') {
        variables(s, out);
        continue;
      } else if (peek().kind == Token::Kind::word && peek(1).value == ":") {
        if (!label(s)) continue;
      } else {
        instruction(s);
      }
      out.push_back(std::move(s));
    }
  }

  void variables(Statement& s, std::vector<Statement>& out) {
    s.kind = Statement::Kind::variable;
    s.variable = variable();
    out.push_back(s);
    while (accept(",")) {
      declarator(s.variable);
      out.push_back(s);
    }
    expect(";");
  }

  // A label, or a table of branch targets; prototypes of indirect calls are dropped.
  bool label(Statement& s) {
    s.kind = Statement::Kind::label;
    s.name = next().value;
    expect(":");
    if (accept(".branchtargets")) {
      s.kind = Statement::Kind::targets;
      do s.operands.push_back(operand());
      while (accept(","));
      expect(";");
    } else if (is(".callprototype")) {
      skip_to(";");
      return false;
    }
    return true;
  }

  void instruction(Statement& s) {
    if (accept("@")) {
      s.guard_negated = accept("!");
      s.guard = next().value;
    }
    if (peek().kind != Token::Kind::word) fail("expected an instruction, found '" + peek().value + "'");
    s.name = next().value;
    s.opcode = split_dots(s.name);
    if (!is(";")) {
      do s.operands.push_back(operand());
      while (accept(","));
    }
    expect(";");
  }

  Operand operand() {
    Operand o;
    if (accept("[")) {
      o = operand();
      o.kind = Operand::Kind::address;
      if (accept(",")) o.parts.push_back(operand());
      expect("]");
      return o;
    }
    if (is("{") || is("(")) {
      const char* close = next().value == "{" ? "}" : ")";
      o.kind = Operand::Kind::list;
      while (!accept(close)) {
        o.parts.push_back(operand());
        accept(",");
      }
      return o;
    }
    o.negated = accept("!");
    if (peek().kind == Token::Kind::word) {
      o.name = next().value;
      if (accept("|")) o.second = next().value;
      if (accept("+"))
        o.offset = static_cast<std::int64_t>(integer());
      else if (is("-"))
        o.offset = static_cast<std::int64_t>(integer());
      return o;
    }
    return number(o);
  }

  Operand number(Operand o) {
    const std::string digits = peek(is("-") ? 1 : 0).value;
    if (starts_with(digits, "0f") || starts_with(digits, "0F")) {
      o.kind = Operand::Kind::real32;
    } else if (starts_with(digits, "0d") || starts_with(digits, "0D")) {
      o.kind = Operand::Kind::real64;
    } else if (digits.find('.') != std::string::npos) {
      const bool negative = accept("-");
      const double value = std::stod(next().value) * (negative ? -1 : 1);
      o.kind = Operand::Kind::real64;
      std::memcpy(&o.bits, &value, sizeof value);
      return o;
    } else {
      o.kind = Operand::Kind::integer;
      o.bits = integer();
      if (accept("+")) o.bits += integer();
      return o;
    }
    const bool negative = accept("-");
    o.bits = std::stoull(next().value.substr(2), nullptr, 16);
    if (negative) o.bits ^= o.kind == Operand::Kind::real32 ? 0x80000000ull : 0x8000000000000000ull;
    return o;
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  Module module_;
  SourceLine source_;
};

}  // namespace

Module parse(const std::string& text) { return Parser(text).run(); }

}  // namespace gpusim::ptx
