// Upstream writes the reason why a grammar does not parse to stderr, recurses as deeply as a grammar is nested, writes out
// repetitions (for {3,2} until the memory is full), and looks for left recursion along every path through the rules. So
// nesting and repetitions are counted in the text, its parser is called rule by rule, and the paths are counted before they
// are walked.
#include "phx_grammar.h"

#include "llama-grammar.h"
#include "phx_impl.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace {

constexpr size_t MAX_BYTES = 1 << 20;
constexpr size_t MAX_NESTING = 200;     // of parentheses; a level takes about a kilobyte of stack
constexpr size_t MAX_DEPTH = 5000;      // of rules that begin with another rule
constexpr uint64_t MAX_PATHS = 1000000;
constexpr uint64_t MAX_REPEATED = 4000000;  // elements of 16 bytes that repetitions make
constexpr uint64_t PER_REPETITION = 16;     // of them for the rule that an optional repetition makes

[[noreturn]] void refuse(const std::string & reason) {
    throw phx::error(PHX_ERR_GRAMMAR, "the grammar cannot be used: " + reason);
}

// The characters of a grammar, as far as they must be understood to count nesting and repetitions.
class scanner {
  public:
    explicit scanner(const char * grammar) : at(grammar) {}

    void check() {
        size_t depth = 0;
        uint64_t size = 1;       // elements of the item before, which a repetition repeats
        uint64_t n_repeated = 0;  // elements in all
        for (skip_space(); *at; skip_space()) {
            if (*at == '"' || *at == '[') {
                size = skip_literal();
            } else if (*at == '{') {
                const uint64_t times = repetitions();
                n_repeated += (size + PER_REPETITION) * times;
                size *= std::max<uint64_t>(1, times);
                if (n_repeated > MAX_REPEATED) {
                    refuse("its repetitions are too many or of too long texts: more than " + std::to_string(MAX_REPEATED) + " elements");
                }
            } else if (strchr("*+?}", *at)) {
                at++;
            } else {
                size = 1;
                depth += *at == '(';
                depth -= *at == ')' && depth > 0;
                if (depth > MAX_NESTING) {
                    refuse("more than " + std::to_string(MAX_NESTING) + " parentheses inside each other");
                }
                at++;
            }
        }
    }

  private:
    void skip_space() {
        while (*at && strchr(" \t\r\n#", *at)) {
            at += *at == '#' ? strcspn(at, "\r\n") : 1;
        }
    }

    // Skips what stands between quotes or brackets; returns its length. The parser says if it does not end.
    uint64_t skip_literal() {
        const char * begin = at;
        const char end = *at == '"' ? '"' : ']';
        for (at++; *at && *at != end; at++) {
            if (*at == '\\' && at[1]) {
                at++;
            }
        }
        at += *at != '\0';
        return uint64_t(at - begin);
    }

    // Skips {n}, {n,} or {n,m}; returns the larger number. The parser says if it is none of these.
    uint64_t repetitions() {
        at++;
        const uint64_t least = number();
        skip_space();
        if (*at != ',') {
            return least;
        }
        at++;
        skip_space();
        if (!isdigit((unsigned char) *at)) {
            return least;
        }
        const uint64_t most = number();
        if (most < least) {
            refuse("the repetition {" + std::to_string(least) + "," + std::to_string(most) + "} has its limits in the wrong order");
        }
        return most;
    }

    uint64_t number() {
        skip_space();
        uint64_t result = 0;
        for (; isdigit((unsigned char) *at); at++) {
            result = std::min<uint64_t>(MAX_REPEATED + 1, result * 10 + uint64_t(*at - '0'));
        }
        return result;
    }

    const char * at;
};

// How a text can begin: walks the rules that may come first, each of them once.
class beginnings {
  public:
    explicit beginnings(const llama_grammar_parser & parser) : rules(parser.rules), states(rules.size()) {
        for (const auto & [name, id] : parser.symbol_ids) {
            names[id] = name;
        }
    }

    // Paths from the rule through rules that come first.
    uint64_t paths(size_t rule, size_t depth = 0) {
        state & s = states[rule];
        if (s.done) {
            return s.n_paths;
        }
        if (s.visiting) {
            refuse("the rule '" + names[uint32_t(rule)] + "' is left-recursive: it may begin with itself");
        }
        if (depth > MAX_DEPTH) {
            refuse("the rules are nested too deeply");
        }
        s.visiting = true;
        uint64_t n = 1;
        bool first = true;
        for (const llama_grammar_element & element : rules[rule]) {
            if (element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT) {
                first = true;
            } else if (element.type == LLAMA_GRETYPE_RULE_REF && first) {
                n = std::min(MAX_PATHS + 1, n + paths(element.value, depth + 1));
                first = may_be_empty(element.value);
            } else {
                first = false;
            }
        }
        s = { n, false, true };
        return n;
    }

  private:
    // As upstream sees it: one of the alternatives is empty.
    bool may_be_empty(size_t rule) const {
        bool at_start = true;
        for (const llama_grammar_element & element : rules[rule]) {
            const bool is_end = element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
            if (is_end && at_start) {
                return true;
            }
            at_start = is_end;
        }
        return false;
    }

    struct state {
        uint64_t n_paths = 0;
        bool visiting = false;
        bool done = false;
    };

    const llama_grammar_rules & rules;
    std::vector<state> states;
    std::map<uint32_t, std::string> names;
};

// The rules, or the reason why there are none.
void parse(llama_grammar_parser & parser, const char * grammar) {
    // Upstream's function for one rule starts at its name.
    const std::string text = grammar;
    const char * at = text.c_str();
    while (*at && strchr(" \t\r\n#", *at)) {
        at += *at == '#' ? strcspn(at, "\r\n") : 1;
    }
    try {
        while (*at) {
            at = parser.parse_rule(at);
        }
    } catch (const phx::error &) {
        throw;
    } catch (const std::exception & e) {
        std::string reason = e.what();
        const size_t line_end = reason.find('\n');
        reason = reason.substr(0, std::min<size_t>(line_end, 120));
        refuse(reason + " (in or after line " + std::to_string(1 + std::count(text.c_str(), at, '\n')) + ")");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            refuse("there is no rule '" + name + "'");
        }
    }
    if (!parser.symbol_ids.count("root")) {
        refuse("there is no rule 'root', where the text begins");
    }
}

}  // namespace

namespace phx {

void check_grammar(const llama_vocab * vocab, const char * grammar) {
    if (strlen(grammar) > MAX_BYTES) {
        refuse("it has more than " + std::to_string(MAX_BYTES) + " bytes");
    }
    scanner(grammar).check();
    llama_grammar_parser parser(vocab);
    parse(parser, grammar);
    beginnings begin(parser);
    uint64_t n_paths = 0;
    for (size_t rule = 0; rule < parser.rules.size(); rule++) {
        n_paths += begin.paths(rule);
        if (n_paths > MAX_PATHS) {
            refuse("too many ways to begin a text: more than " + std::to_string(MAX_PATHS) + " paths through the rules");
        }
    }
}

}  // namespace phx
