// A program linked to libtorch; only the libraries that it loads matter.
int main() { return 0; }
