// Checks of a GBNF grammar before upstream's sampler gets it.
#pragma once

#include <string>

struct llama_vocab;

namespace phx {

// Throws PHX_ERR_GRAMMAR, with the reason, if upstream could not use the grammar: if it does not parse, a rule is missing,
// left-recursive or nested too deeply, or if so many rules can begin a text that upstream's own check would not end.
void check_grammar(const llama_vocab * vocab, const char * grammar);

}  // namespace phx
