// Stands in for a Gloo header that the torch wheel lacks; see third_party/BUILD.
