// Linked to libtorch; what it loads is all that matters.
int main() { return 0; }
